"""Query strings. :func:`sandkeep.wire.base.convert` decodes them and ignores unknown parameters.

A text that was not given is empty.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field

from sandkeep.checks import refuse
from sandkeep.spec import MAX_TAGS
from sandkeep.states import DriveSort, SandboxSort, SessionStatus, SnapshotStatus, SortOrder
from sandkeep.wire.base import Body, given

PAGE = 20
Limit = Annotated[int, Meta(ge=1, le=100)]
Cursor = Annotated[str, Meta(max_length=1024)]


class GetSandboxQuery(Body, kw_only=True, frozen=True):
    resume: bool = False


class DeleteSandboxQuery(Body, kw_only=True, frozen=True):
    delete_orphan_snapshots: bool = False
    session: str | UnsetType = UNSET
    """Only the sandbox of this session, not another one with the same name; our addition."""
    only_stopped: bool = False
    """Refuse to delete a sandbox that has a session; our addition."""


class ListSandboxesQuery(Body, kw_only=True, frozen=True):
    limit: Limit = PAGE
    cursor: Cursor = ""
    sort_by: SandboxSort | UnsetType = UNSET
    sort_order: SortOrder = SortOrder.DESC
    name_prefix: str = ""
    tags: Annotated[list[str], Meta(max_length=MAX_TAGS)] = field(default_factory=list)
    """``KEY:VALUE``, repeated for several: sandboxes that have all of them. Official clients send one."""
    status: SessionStatus | UnsetType = UNSET

    def __post_init__(self) -> None:
        found: dict[str, str] = {}
        for tag in filter(None, self.tags):
            key, colon, value = tag.partition(":")
            if not colon:
                refuse("tags", "must be KEY:VALUE")
            if found.setdefault(key, value) != value:
                refuse("tags", f"has two values for {key}")
        if self.name_prefix and self.sort_by not in (UNSET, SandboxSort.NAME):
            refuse("namePrefix", "is possible only with sortBy=name")

    @property
    def sort(self) -> SandboxSort:
        """Return the sort key; a prefix implies sorting by name."""
        return given(self.sort_by, SandboxSort.NAME if self.name_prefix else SandboxSort.CREATED_AT)

    @property
    def wanted(self) -> dict[str, str]:
        """Return the tags by key; a value may contain colons, a key may not."""
        return {key: value for key, _, value in (tag.partition(":") for tag in self.tags if tag)}


class ListSessionsQuery(Body, kw_only=True, frozen=True):
    name: str = ""
    limit: Limit = PAGE
    cursor: Cursor = ""
    sort_order: SortOrder = SortOrder.DESC


class ListSnapshotsQuery(ListSessionsQuery, kw_only=True, frozen=True):
    status: SnapshotStatus | UnsetType = UNSET
    orphaned: bool = False
    """Only those of sandboxes that no longer exist, that no sandbox starts from; our addition."""


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
