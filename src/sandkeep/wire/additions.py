"""Our own routes, beyond what official clients know: their requests and answers.

They live below ``/v1``. Paths inside a sandbox are text; bytes that are no text are written as surrogate
escapes are: ``\\udcXX``.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, field

from sandkeep.types import FileKind, OutputStream, SortOrder
from sandkeep.wire.base import Body, Count, Object
from sandkeep.wire.bodies import ReadBody
from sandkeep.wire.objects import CommandObject, Pagination
from sandkeep.wire.queries import PAGE, Cursor, Limit

Mode = Annotated[int, Meta(ge=0, le=0o7777)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]


class TerminalBody(Body, kw_only=True, frozen=True):
    """Who a terminal is for; the sandbox's own user unless said otherwise."""

    user: Text | UnsetType = UNSET


# --- files -------------------------------------------------------------------------------------------


class _Acting(ReadBody, kw_only=True, frozen=True):
    """A file operation as one of the sandbox's users; as its own user unless said otherwise."""

    user: Text | UnsetType = UNSET
    sudo: bool = False


class StatBody(_Acting, kw_only=True, frozen=True):
    follow: bool = True


class ListBody(_Acting, kw_only=True, frozen=True):
    pass


class MakeDirectoryBody(_Acting, kw_only=True, frozen=True):
    parents: bool = True
    mode: Mode = 0o755


class RenameBody(_Acting, kw_only=True, frozen=True):
    target: Text
    replace: bool = True


class RemoveBody(_Acting, kw_only=True, frozen=True):
    recursive: bool = False
    missing_ok: bool = False


class WatchBody(_Acting, kw_only=True, frozen=True):
    recursive: bool = True


class ChangeObject(Object, kw_only=True, frozen=True):
    kind: str
    """``created``, ``modified``, ``removed``; ``overflow`` when some were missed."""
    path: str
    directory: bool = False


class ChangesRecord(Object, kw_only=True, frozen=True):
    """A line of a watch. The first has no changes: from there on nothing is missed."""

    changes: list[ChangeObject]
    path: str | UnsetType = UNSET
    """In the first: the directory, as the paths of changes below it begin."""


class SymlinkBody(_Acting, kw_only=True, frozen=True):
    target: Text
    """What the link says, resolved by whoever follows it."""


class ReadlinkBody(_Acting, kw_only=True, frozen=True):
    pass


class ChmodBody(_Acting, kw_only=True, frozen=True):
    mode: Mode


class CopyBody(_Acting, kw_only=True, frozen=True):
    target: Text
    parents: bool = False


class ArchiveBody(Body, kw_only=True, frozen=True):
    paths: Annotated[list[Text], Meta(min_length=1, max_length=10_000)]
    ignore: Annotated[list[Text], Meta(max_length=1000)] = field(default_factory=list)
    """Names, or with a slash whole entry names, to leave out; ``*`` matches anything."""
    cwd: Text | UnsetType = UNSET
    user: Text | UnsetType = UNSET
    sudo: bool = False


class ExtractQuery(Body, kw_only=True, frozen=True):
    cwd: Text | UnsetType = UNSET
    """Where entries go; the session's working directory when not given."""
    user: Text | UnsetType = UNSET
    sudo: bool = False


class ContentQuery(Body, kw_only=True, frozen=True):
    path: Text
    cwd: Text | UnsetType = UNSET
    user: Text | UnsetType = UNSET
    sudo: bool = False


class ReadContentQuery(ContentQuery, kw_only=True, frozen=True):
    offset: Count = 0
    length: Count | UnsetType = UNSET


class WriteContentQuery(ContentQuery, kw_only=True, frozen=True):
    mode: Mode | UnsetType = UNSET
    parents: bool = False
    append: bool = False
    exclusive: bool = False
    """Fail when the file exists."""


class FileObject(Object, kw_only=True, frozen=True):
    name: str
    kind: FileKind
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ino: int
    nlink: int
    target: str | UnsetType = UNSET
    """What a symbolic link says."""


class FileShown(Object, kw_only=True, frozen=True):
    file: FileObject


class FileList(Object, kw_only=True, frozen=True):
    files: list[FileObject]


class Extracted(Object, kw_only=True, frozen=True):
    entries: int


class LinkShown(Object, kw_only=True, frozen=True):
    target: str


class Written(Object, kw_only=True, frozen=True):
    bytes_written: int


# --- processes -----------------------------------------------------------------------------------------


class ProcessObject(CommandObject, kw_only=True, frozen=True):
    """A command with everything known about it."""

    kind: str
    """``run``, ``interactive`` or ``observed``."""
    user: str | UnsetType = UNSET
    """Who it runs as, when not the sandbox's own user."""
    finished_at: int | UnsetType = UNSET


class ProcessShown(Object, kw_only=True, frozen=True):
    process: ProcessObject


class ProcessList(Object, kw_only=True, frozen=True):
    processes: list[ProcessObject]


class OutputQuery(Body, kw_only=True, frozen=True):
    offset: Count = 0
    follow: bool = True


class ObserveBody(Body, kw_only=True, frozen=True):
    command: Text
    args: list[str] = field(default_factory=list)
    cwd: Text = "/"


class AppendQuery(Body, kw_only=True, frozen=True):
    stream: OutputStream = OutputStream.STDOUT


class Appended(Object, kw_only=True, frozen=True):
    offset: int
    """The length of the log now."""


class FinishBody(Body, kw_only=True, frozen=True):
    exit_code: Annotated[int, Meta(ge=0, le=255)] | UnsetType = UNSET
    """Absent: it failed in another way, told by ``reason``."""
    reason: Annotated[str, Meta(max_length=4096)] | UnsetType = UNSET


# --- events and usage ------------------------------------------------------------------------------------


class ListEventsQuery(Body, kw_only=True, frozen=True):
    name: str = ""
    """Of one sandbox."""
    session: str = ""
    kind: str = ""
    kind_prefix: str = ""
    """Of every kind that begins so, such as ``network.``."""
    limit: Limit = PAGE
    cursor: Cursor = ""
    sort_order: SortOrder = SortOrder.DESC
    follow: bool = False
    """Go on, oldest first, as events happen; as NDJSON. Without a cursor: from now on, or with the order
    ``asc`` from the oldest on."""


class EventObject(Object, kw_only=True, frozen=True):
    id: str
    sequence: int
    time: int
    kind: str
    actor: str | UnsetType = UNSET
    """Who had it done: a token or a user of the machine; absent for what came by itself or from inside."""
    sandbox_name: str | UnsetType = UNSET
    session_id: str | UnsetType = UNSET
    data: dict[str, Any]


class EventPage(Object, kw_only=True, frozen=True):
    events: list[EventObject]
    pagination: Pagination


class EventRecord(Object, kw_only=True, frozen=True):
    """A line of the answer to following: an event, and the cursor that goes on after it."""

    event: EventObject
    cursor: str


class UsageObject(Object, kw_only=True, frozen=True):
    active_cpu_duration_ms: int
    duration_ms: int
    ingress_bytes: int
    egress_bytes: int
    memory_bytes: int | UnsetType = UNSET
    """Now, of a running session."""
    memory_peak_bytes: int | UnsetType = UNSET
    pids: int | UnsetType = UNSET
    oom_kills: int | UnsetType = UNSET


class UsageShown(Object, kw_only=True, frozen=True):
    usage: UsageObject


# --- the server ------------------------------------------------------------------------------------------


class HealthShown(Object, kw_only=True, frozen=True):
    status: str


class VersionShown(Object, kw_only=True, frozen=True):
    version: str
    api: int
    """Changes when older clients can no longer use the server."""
    embedded: bool
    """Started by a client, and ending by itself when nobody needs it."""
