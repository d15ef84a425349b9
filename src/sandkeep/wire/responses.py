"""The objects around the resources of ``objects`` in each response."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from sandkeep.wire.base import Object
from sandkeep.wire.objects import (
    CommandObject,
    DriveObject,
    Pagination,
    RouteObject,
    SandboxObject,
    SessionObject,
    SnapshotObject,
    TreeNode,
)


class Empty(Object, kw_only=True, frozen=True):
    """An empty object: ``{}``."""


class SandboxStarted(Object, kw_only=True, frozen=True):
    """Create, fork, get and resume."""

    sandbox: SandboxObject
    session: SessionObject
    routes: list[RouteObject]
    resumed: bool
    """This request started a new session of an existing sandbox."""
    left_out: str | UnsetType = UNSET
    """The session that ran when a sandbox was forked; its changes are not in the fork."""


class SandboxesStarted(Object, kw_only=True, frozen=True):
    """Create or fork several."""

    sandboxes: list[SandboxStarted]


class SandboxUpdated(Object, kw_only=True, frozen=True):
    sandbox: SandboxObject
    routes: list[RouteObject] | UnsetType = UNSET
    """Present if the request had ports."""


class SandboxDeleted(Object, kw_only=True, frozen=True):
    sandbox: SandboxObject


class SandboxPage(Object, kw_only=True, frozen=True):
    sandboxes: list[SandboxObject]
    pagination: Pagination


class SessionShown(Object, kw_only=True, frozen=True):
    session: SessionObject
    routes: list[RouteObject]


class SessionChanged(Object, kw_only=True, frozen=True):
    """Extend the timeout, replace the live network policy."""

    session: SessionObject


class SessionStopped(Object, kw_only=True, frozen=True):
    session: SessionObject
    sandbox: SandboxObject
    snapshot: SnapshotObject | UnsetType = UNSET
    """Present if the sandbox is persistent."""


class SessionPage(Object, kw_only=True, frozen=True):
    sessions: list[SessionObject]
    pagination: Pagination


class SnapshotTaken(Object, kw_only=True, frozen=True):
    snapshot: SnapshotObject
    session: SessionObject


class SnapshotShown(Object, kw_only=True, frozen=True):
    snapshot: SnapshotObject


class SnapshotPage(Object, kw_only=True, frozen=True):
    snapshots: list[SnapshotObject]
    pagination: Pagination


class SnapshotTree(Object, kw_only=True, frozen=True):
    snapshots: list[TreeNode]
    """Without the anchor."""
    anchor: TreeNode
    pagination: Pagination
    """``next`` is a snapshot id here: the anchor of the next request."""


class CommandShown(Object, kw_only=True, frozen=True):
    command: CommandObject


class CommandList(Object, kw_only=True, frozen=True):
    commands: list[CommandObject]


class StdinWritten(Object, kw_only=True, frozen=True):
    command: CommandObject
    bytes_written: int
    """In total, since the process started."""


class TerminalOpened(Object, kw_only=True, frozen=True):
    url: str
    """Without a query string: clients append the token, and some drop an existing query."""
    token: str


class DriveShown(Object, kw_only=True, frozen=True):
    drive: DriveObject


class DrivePage(Object, kw_only=True, frozen=True):
    drives: list[DriveObject]
    pagination: Pagination


class UserObject(Object, kw_only=True, frozen=True):
    default_team_id: str | None
    username: str


class UserShown(Object, kw_only=True, frozen=True):
    user: UserObject


class ProjectShown(Object, kw_only=True, frozen=True):
    id: str
    name: str


class MembershipObject(Object, kw_only=True, frozen=True):
    role: str


class BillingObject(Object, kw_only=True, frozen=True):
    plan: str


class TeamObject(Object, kw_only=True, frozen=True):
    id: str
    slug: str
    membership: MembershipObject
    billing: BillingObject


class TeamsPagination(Object, kw_only=True, frozen=True):
    count: int
    next: int | None


class TeamPage(Object, kw_only=True, frozen=True):
    teams: list[TeamObject]
    pagination: TeamsPagination
