"""Bodies and responses of our own routes below ``/v1``, which official clients do not know.

Paths inside a sandbox are text; bytes that are not UTF-8 are written as surrogate escapes: ``\\udcXX``.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, field

from sandkeep.checks import check_metadata, refuse
from sandkeep.states import FileKind, OutputStream, SortOrder
from sandkeep.wire.base import MAX_SAFE, Body, Count, Object
from sandkeep.wire.objects import CommandObject, Pagination
from sandkeep.wire.paths import ReadBody
from sandkeep.wire.queries import PAGE, Cursor, Limit

Mode = Annotated[int, Meta(ge=0, le=0o7777)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]


class TerminalBody(Body, kw_only=True, frozen=True):
    """User of the terminal; by default the sandbox's own."""

    user: Text | UnsetType = UNSET
    extend_timeout: bool | UnsetType = UNSET
    """Extend the session's timeout before it is reached, as long as the terminal is open."""


# --- files -------------------------------------------------------------------------------------------


class _Acting(ReadBody, kw_only=True, frozen=True):
    """A file operation as one of the sandbox's users; by default its own user."""

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
    """``created``, ``modified``, ``removed``; ``overflow`` if some were missed."""
    path: str
    directory: bool = False


class ChangesRecord(Object, kw_only=True, frozen=True):
    """A line of a watch. The first has no changes: from then on nothing is missed."""

    changes: list[ChangeObject]
    path: str | UnsetType = UNSET
    """In the first line: the directory, with which the paths of changes begin."""


class SymlinkBody(_Acting, kw_only=True, frozen=True):
    target: Text
    """Target of a link, unresolved."""


class ReadlinkBody(_Acting, kw_only=True, frozen=True):
    pass


class RealpathBody(_Acting, kw_only=True, frozen=True):
    strict: bool = False
    """Fail if a part of the path does not exist or is not accessible; otherwise it stays as it is."""


class ChmodBody(_Acting, kw_only=True, frozen=True):
    mode: Mode


class CopyBody(_Acting, kw_only=True, frozen=True):
    target: Text
    parents: bool = False


class ArchiveBody(Body, kw_only=True, frozen=True):
    paths: Annotated[list[Text], Meta(min_length=1, max_length=10_000)]
    ignore: Annotated[list[Text], Meta(max_length=1000)] = field(default_factory=list)
    """Names, or with a slash whole entry names, to leave out; ``*`` matches anything."""
    report: bool = False
    """If something cannot be read: append the error as JSON after the end of the archive, instead of cutting
    the connection."""
    cwd: Text | UnsetType = UNSET
    user: Text | UnsetType = UNSET
    sudo: bool = False


Names = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=100_000)]


class TreeBody(_Acting, kw_only=True, frozen=True):
    ignore: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=1000)] = field(
        default_factory=list
    )
    """Patterns of entries to leave out, in the syntax of ``.gitignore``."""
    checksum: bool = False
    """Also return a digest of the content of each file."""


class TreeNamesBody(_Acting, kw_only=True, frozen=True):
    names: Names
    """Paths relative to ``path``, without ``..``."""


class TreeEntryObject(Object, kw_only=True, frozen=True):
    path: str
    """Relative to the tree."""
    kind: FileKind
    size: int
    mode: int
    mtime_ns: int
    target: str | UnsetType = UNSET
    """Target of the symbolic link."""
    digest: str | UnsetType = UNSET
    """BLAKE2b of the content, 32 bytes in hexadecimal; absent if the file cannot be read."""
    unreadable: bool | UnsetType = UNSET
    """True for a directory whose content is not known, because it cannot be read."""


class TreeRecord(Object, kw_only=True, frozen=True):
    """A line of the listing of a tree. The last one has ``end``, or an error instead."""

    entries: list[TreeEntryObject] = field(default_factory=list)
    end: bool = False
    error: dict[str, Any] | UnsetType = UNSET


class TreeRemoved(Object, kw_only=True, frozen=True):
    kept: list[str]
    """Directories that stay: they are not empty, or something is mounted on them."""


class ExtractQuery(Body, kw_only=True, frozen=True):
    cwd: Text | UnsetType = UNSET
    """Directory to unpack into; by default the session's working directory."""
    user: Text | UnsetType = UNSET
    sudo: bool = False


class ContentQuery(Body, kw_only=True, frozen=True):
    path: Text
    cwd: Text | UnsetType = UNSET
    user: Text | UnsetType = UNSET
    sudo: bool = False


class ReadLinesBody(_Acting, kw_only=True, frozen=True):
    start: Annotated[int, Meta(ge=1, le=MAX_SAFE)] = 1
    """The first line; lines are counted from 1."""
    limit: Annotated[int, Meta(ge=1, le=MAX_SAFE)] = 2000
    max_bytes: Annotated[int, Meta(ge=1, le=4 << 20)] = 1 << 20
    """Only as many whole lines as fit into this; a single longer line is cut."""


class LinesShown(Object, kw_only=True, frozen=True):
    text: str
    """The lines with their line feeds. Bytes that are not UTF-8 are written as surrogate escapes."""
    start: int
    lines: int
    """Number of lines in ``text``."""
    more: bool
    """Whether the file goes on after them."""
    cut: bool
    """Whether the only line is longer than ``maxBytes`` and its end is missing."""


class ReadContentQuery(ContentQuery, kw_only=True, frozen=True):
    offset: Count = 0
    length: Count | UnsetType = UNSET


class WriteContentQuery(ContentQuery, kw_only=True, frozen=True):
    mode: Mode | UnsetType = UNSET
    parents: bool = False
    append: bool = False
    exclusive: bool = False
    """Fail if the file exists."""


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
    """Target of the symbolic link."""


class FileShown(Object, kw_only=True, frozen=True):
    file: FileObject


class FileList(Object, kw_only=True, frozen=True):
    files: list[FileObject]


class Extracted(Object, kw_only=True, frozen=True):
    entries: int


class LinkShown(Object, kw_only=True, frozen=True):
    target: str


class PathShown(Object, kw_only=True, frozen=True):
    path: str


class Written(Object, kw_only=True, frozen=True):
    bytes_written: int


# --- processes -----------------------------------------------------------------------------------------


class ProcessObject(CommandObject, kw_only=True, frozen=True):
    """A command with everything known about it."""

    kind: str
    """``run``, ``interactive`` or ``observed``."""
    user: str | UnsetType = UNSET
    """The account it runs as, if not the sandbox's own user."""
    finished_at: int | UnsetType = UNSET


class ProcessShown(Object, kw_only=True, frozen=True):
    process: ProcessObject


class ProcessList(Object, kw_only=True, frozen=True):
    processes: list[ProcessObject]


class OutputQuery(Body, kw_only=True, frozen=True):
    offset: Count = 0
    follow: bool = True


class StdinShown(Object, kw_only=True, frozen=True):
    bytes_written: int
    """Bytes that have arrived in total, whether or not the process has read them."""
    open: bool
    """Whether more can be written."""


class ListProcessesQuery(Body, kw_only=True, frozen=True):
    metadata: str = ""
    """Only processes with this key and value: ``KEY:VALUE``."""

    def __post_init__(self) -> None:
        if self.metadata and ":" not in self.metadata:
            refuse("metadata", "must be KEY:VALUE")


class ObserveBody(Body, kw_only=True, frozen=True):
    command: Text
    args: list[str] = field(default_factory=list)
    cwd: Text = "/"
    metadata: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_metadata(self.metadata)


class AppendQuery(Body, kw_only=True, frozen=True):
    stream: OutputStream = OutputStream.STDOUT


class Appended(Object, kw_only=True, frozen=True):
    offset: int
    """The present length of the log."""


class FinishBody(Body, kw_only=True, frozen=True):
    exit_code: Annotated[int, Meta(ge=0, le=255)] | UnsetType = UNSET
    """Absent if it failed in another way, see ``reason``."""
    reason: Annotated[str, Meta(max_length=4096)] | UnsetType = UNSET


# --- events and usage ------------------------------------------------------------------------------------


class ListEventsQuery(Body, kw_only=True, frozen=True):
    name: str = ""
    """Only events of one sandbox."""
    session: str = ""
    kind: str = ""
    kind_prefix: str = ""
    """Only events whose kind starts with this, such as ``network.``."""
    limit: Limit = PAGE
    cursor: Cursor = ""
    sort_order: SortOrder = SortOrder.DESC
    follow: bool = False
    """Continue with new events, oldest first, as NDJSON. Without a cursor it starts now, or with the order
    ``asc`` at the oldest event."""


class EventObject(Object, kw_only=True, frozen=True):
    id: str
    sequence: int
    time: int
    kind: str
    actor: str | UnsetType = UNSET
    """Who caused it: a token or a user of the machine; absent if the server or the sandbox did."""
    sandbox_name: str | UnsetType = UNSET
    session_id: str | UnsetType = UNSET
    data: dict[str, Any]


class EventPage(Object, kw_only=True, frozen=True):
    events: list[EventObject]
    pagination: Pagination


class EventRecord(Object, kw_only=True, frozen=True):
    """A line of a followed list: an event, and the cursor after it."""

    event: EventObject
    cursor: str


class UsageObject(Object, kw_only=True, frozen=True):
    active_cpu_duration_ms: int
    duration_ms: int
    ingress_bytes: int
    egress_bytes: int
    memory_bytes: int | UnsetType = UNSET
    """At present, of a running session."""
    memory_peak_bytes: int | UnsetType = UNSET
    pids: int | UnsetType = UNSET
    oom_kills: int | UnsetType = UNSET


class UsageShown(Object, kw_only=True, frozen=True):
    usage: UsageObject


# --- the server ------------------------------------------------------------------------------------------


class HealthShown(Object, kw_only=True, frozen=True):
    status: str
    """``ok``, or ``not ready`` if sandboxes cannot be created."""
    problems: list[str] | UnsetType = UNSET
    """Why not, for the operator."""


class LogInEndpoints(Object, rename=None, kw_only=True, frozen=True):
    """Metadata of an authorization server, limited to the fields that official clients read."""

    issuer: str
    device_authorization_endpoint: str
    token_endpoint: str
    revocation_endpoint: str
    introspection_endpoint: str
    jwks_uri: str


class LogInBegun(Object, rename=None, kw_only=True, frozen=True):
    """The response to a device authorization request."""

    verification_uri: str
    verification_uri_complete: str
    device_code: str = "none"
    user_code: str = "none"
    expires_in: int = 60
    interval: int = 5


class LogInDenied(Object, rename=None, kw_only=True, frozen=True):
    """An error of OAuth 2.0."""

    error: str = "access_denied"
    error_description: str = (
        "this server has no log-in: its operator makes tokens with 'sandkeep token create'; "
        "pass yours with --token or as VERCEL_AUTH_TOKEN"
    )


class VersionShown(Object, kw_only=True, frozen=True):
    version: str
    api: int
    """Increases when older clients can no longer use the server."""
    embedded: bool
    """Started by a client; exits by itself when unused."""
    preparing: str | UnsetType = UNSET
    """What starts of sandboxes wait for now: ``host image``, made once for each state of the machine."""
