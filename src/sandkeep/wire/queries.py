"""What query strings carry. :func:`sandkeep.wire.base.convert` reads them and ignores unknown parameters.

A text that was not given is empty.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from sandkeep.types import DriveSort, SandboxSort, SessionStatus, SnapshotStatus, SortOrder, refuse
from sandkeep.wire.base import Body, given

PAGE = 20
Limit = Annotated[int, Meta(ge=1, le=100)]
Cursor = Annotated[str, Meta(max_length=1024)]


class ScopeQuery(Body, kw_only=True, frozen=True):
    """Every request: who asks, and in which project."""

    team_id: str = ""
    slug: str = ""
    project_id: str = ""
    project: str = ""


class GetSandboxQuery(Body, kw_only=True, frozen=True):
    resume: bool = False


class DeleteSandboxQuery(Body, kw_only=True, frozen=True):
    delete_orphan_snapshots: bool = False


class ListSandboxesQuery(Body, kw_only=True, frozen=True):
    limit: Limit = PAGE
    cursor: Cursor = ""
    sort_by: SandboxSort | UnsetType = UNSET
    sort_order: SortOrder = SortOrder.DESC
    name_prefix: str = ""
    tags: str = ""
    status: SessionStatus | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.tags and ":" not in self.tags:
            refuse("tags", "must be a key and a value with a colon between them")
        if self.name_prefix and self.sort_by not in (UNSET, SandboxSort.NAME):
            refuse("namePrefix", "needs sortBy=name")

    @property
    def sort(self) -> SandboxSort:
        """A prefix implies the order it can be searched in."""
        return given(self.sort_by, SandboxSort.NAME if self.name_prefix else SandboxSort.CREATED_AT)

    @property
    def tag(self) -> tuple[str, str] | None:
        """Key and value; the value may contain colons, the key may not."""
        if not self.tags:
            return None
        key, _, value = self.tags.partition(":")
        return key, value


class ListSessionsQuery(Body, kw_only=True, frozen=True):
    name: str = ""
    limit: Limit = PAGE
    cursor: Cursor = ""
    sort_order: SortOrder = SortOrder.DESC


class ListSnapshotsQuery(ListSessionsQuery, kw_only=True, frozen=True):
    status: SnapshotStatus | UnsetType = UNSET


class SnapshotTreeQuery(Body, kw_only=True, frozen=True):
    snapshot_id: str
    limit: Annotated[int, Meta(ge=1, le=10)] = 10
    sort_order: SortOrder = SortOrder.DESC
    """Descending: ancestors. Ascending: descendants."""


class ListDrivesQuery(Body, kw_only=True, frozen=True):
    limit: Limit = PAGE
    cursor: Cursor = ""
    sort_by: DriveSort = DriveSort.CREATED_AT
    sort_order: SortOrder = SortOrder.DESC
    name_prefix: str = ""


class GetCommandQuery(Body, kw_only=True, frozen=True):
    wait: bool = False
