"""Queries for lists. Each class allows only the combinations that the server supports.

Pass one to ``query_sandboxes``, ``query_sessions``, ``query_snapshots`` or ``query_drives``; without one,
everything is listed, newest first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sandkeep.checks import expect, refuse
from sandkeep.dataclass import dataclass
from sandkeep.spec import check_tags
from sandkeep.states import DriveSort, SandboxSort, SessionStatus, SnapshotStatus, SortOrder

Parameters = dict[str, str | list[str]]
"""Of a query string; a list is a parameter that is repeated."""


def _check_limit(limit: int) -> None:
    expect("page_size", limit, int, "a number")
    if not 1 <= limit <= 100:
        refuse("page_size", f"must be between 1 and 100, not {limit}")


def _check_sandbox(name: str | None) -> None:
    """Refuse an empty name: the server would list the items of every sandbox."""
    if name is not None:
        expect("sandbox", name, str, "text")
        if not name:
            refuse("sandbox", "must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Query:
    order: SortOrder = SortOrder.DESC
    page_size: int = 50
    """Items per request, at most 100."""

    def __post_init__(self) -> None:
        _check_limit(self.page_size)

    def parameters(self) -> Parameters:
        """Return the parameters of the query string."""
        return {"limit": str(self.page_size), "sortOrder": self.order.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SandboxQuery(_Query):
    sort: ClassVar[SandboxSort]
    tags: Mapping[str, str] | None = None
    """Keys and values that the sandbox's tags must contain, all of them."""
    status: SessionStatus | None = None

    def __post_init__(self) -> None:
        _Query.__post_init__(self)
        if self.tags is not None:
            check_tags(self.tags)

    def parameters(self) -> Parameters:
        """Return the parameters of the query string."""
        found: Parameters = {**_Query.parameters(self), "sortBy": self.sort.value}
        if self.tags:
            found["tags"] = [f"{key}:{value}" for key, value in self.tags.items()]
        if self.status is not None:
            found["status"] = self.status.value
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxQueryByName(_SandboxQuery):
    """Sandboxes ordered by name; only these can be restricted to a prefix."""

    sort: ClassVar[SandboxSort] = SandboxSort.NAME
    order: SortOrder = SortOrder.ASC
    prefix: str = ""

    def parameters(self) -> Parameters:
        """Return the parameters of the query string."""
        found = _SandboxQuery.parameters(self)
        return {**found, "namePrefix": self.prefix} if self.prefix else found


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxQueryByCreated(_SandboxQuery):
    """Sandboxes ordered by creation time."""

    sort: ClassVar[SandboxSort] = SandboxSort.CREATED_AT


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxQueryByStatusUpdated(_SandboxQuery):
    """Sandboxes ordered by the time of their last status change."""

    sort: ClassVar[SandboxSort] = SandboxSort.STATUS_UPDATED_AT


SandboxQuery = SandboxQueryByName | SandboxQueryByCreated | SandboxQueryByStatusUpdated


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionQuery(_Query):
    """Sessions ordered by creation time, of one sandbox or of all."""

    sandbox: str | None = None

    def __post_init__(self) -> None:
        _Query.__post_init__(self)
        _check_sandbox(self.sandbox)

    def parameters(self) -> Parameters:
        """Return the parameters of the query string."""
        found = _Query.parameters(self)
        return found if self.sandbox is None else {**found, "name": self.sandbox}


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotQuery(_Query):
    """Snapshots ordered by creation time, of one sandbox or of all."""

    sandbox: str | None = None
    status: SnapshotStatus | None = None
    orphaned: bool = False
    """Only those whose sandbox no longer exists and that no sandbox starts from."""

    def __post_init__(self) -> None:
        _Query.__post_init__(self)
        _check_sandbox(self.sandbox)

    def parameters(self) -> Parameters:
        """Return the parameters of the query string."""
        found = _Query.parameters(self)
        if self.sandbox is not None:
            found["name"] = self.sandbox
        if self.status is not None:
            found["status"] = self.status.value
        if self.orphaned:
            found["orphaned"] = "true"
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _DriveQuery(_Query):
    sort: ClassVar[DriveSort]

    def parameters(self) -> Parameters:
        """Return the parameters of the query string."""
        return {**_Query.parameters(self), "sortBy": self.sort.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveQueryByName(_DriveQuery):
    """Drives ordered by name; only these can be restricted to a prefix."""

    sort: ClassVar[DriveSort] = DriveSort.NAME
    order: SortOrder = SortOrder.ASC
    prefix: str = ""

    def parameters(self) -> Parameters:
        """Return the parameters of the query string."""
        found = _DriveQuery.parameters(self)
        return {**found, "namePrefix": self.prefix} if self.prefix else found


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveQueryByCreated(_DriveQuery):
    """Drives ordered by creation time."""

    sort: ClassVar[DriveSort] = DriveSort.CREATED_AT


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveQueryByUpdated(_DriveQuery):
    """Drives ordered by the time of their last change."""

    sort: ClassVar[DriveSort] = DriveSort.UPDATED_AT


DriveQuery = DriveQueryByName | DriveQueryByCreated | DriveQueryByUpdated
