"""Every error sandkeep raises on purpose, split by who can act on it.

::

    SandkeepError
    ├── InvalidRequest          the caller's mistake; ``field`` names the argument
    │   └── TimeoutInvalid      a session cannot be extended that far; ``maximum``
    ├── AccessDenied            a valid identity that may not do this
    │   └── Unauthenticated     no identity, or one we do not accept
    ├── NotFound                a named thing that is not there; ``kind`` and ``name``
    │   └── SnapshotGone        it was there, and is deleted or expired; ``snapshot``
    ├── Conflict                it clashes with something that exists
    │   ├── NameTaken           ``name``
    │   ├── ConfigurationDiffers    a sandbox of that name has another; ``field``, ``found``, ``asked``
    │   ├── DriveAttached       mounted read-write elsewhere; ``drive``
    │   └── DriveNotInitialized never mounted, so there is nothing to fork; ``drive``
    ├── WrongState              the thing is there, but not in a state that allows this
    │   ├── SessionStopped      the session has ended; ``session``
    │   ├── SessionStopping     it is ending now; ``session``
    │   └── SessionSnapshotting it is being snapshotted and ends after that; ``session``
    ├── LimitReached            a stated limit; ``limit`` and ``value``
    │   ├── BodyTooLarge        ``limit``
    │   └── RateLimited         ``retry_after`` in seconds
    ├── HostCannot              this machine cannot do it; ``part``, ``why``, and a hint
    │   ├── IsolationUnavailable    a barrier is missing here and the caller did not accept that
    │   └── LimitUnenforceable      a requested resource limit cannot be enforced here
    ├── PathError               a file operation; ``path``, ``errno``, ``operation``
    │   ├── PathNotFound        nothing is there; also a ``FileNotFoundError``
    │   ├── PathExists          something is there already; also a ``FileExistsError``
    │   ├── NotDirectory        part of the path is not a directory; also a ``NotADirectoryError``
    │   ├── IsDirectory         a directory where a file is needed; also an ``IsADirectoryError``
    │   ├── NotRegularFile      a FIFO, device or socket where a file is needed
    │   ├── PathPermission      the user may not do that; also a ``PermissionError``
    │   ├── NoSpace             the disk is full
    │   └── ArchiveError        an archive or a tree; ``path``, ``entry``, and ``entries`` that are in place
    ├── ProcessError            a process cannot be started, reached or completed
    │   ├── ExecutableNotFound  no such program; ``command``
    │   ├── ExecutableRefused   the program is there, but the kernel refuses to run it
    │   ├── StdinUnavailable    never attached, closed, or no longer read by the process
    │   ├── StdinStalled        the process does not read its input at the moment; ``bytes_written``
    │   ├── ProcessFailed       its exit code is not 0; ``command``, ``returncode``, ``reason``, ``duration``
    │   ├── ProcessTimeout      it did not end in time; ``command``, ``timeout``, ``reason``, output so far
    │   └── OutputDamaged       part of its log is damaged on disk; ``process``, ``offset``, ``length``
    ├── ImageError              an image cannot be resolved, fetched, verified or unpacked; ``image``
    ├── LayerError              the layer store is damaged or inconsistent; ``layer``
    ├── StoreError              the metadata database cannot be used; ``path``
    │   ├── SchemaTooNew        a newer sandkeep wrote it; ``found`` and ``known``
    │   └── StoreMismatch       it does not know the layers and sessions beside it; ``found`` says why
    ├── TransportError          the connection failed or the peer did not speak our protocol
    │   ├── StreamClosed        the session was lost in the middle of a stream
    │   ├── ServerUnreachable   no server listens there or could be started; nothing was sent
    │   └── RequestTimeout      no response in time; the request may have been carried out
    └── InternalError           a bug in sandkeep

Facts are attributes and prose is the message; code never parses messages. ``code`` is the stable spelling
used by HTTP, the supervisor protocol and logs, ``hint`` says what to do next, and ``str()`` has message and
hint. This module imports only the standard library, because the supervisor uses it too.
"""

from __future__ import annotations

import errno as _errno
import os
from datetime import timedelta
from typing import Any, ClassVar


class SandkeepError(Exception):
    """Root of the tree. Keyword facts become attributes and travel as ``details``."""

    code: ClassVar[str] = "error"
    usual_errno: ClassVar[int | None] = None
    """``errno`` of a built-in class, if the details have none."""
    http_status: int | None = None
    """HTTP status of the server's response; ``None`` for an error raised by the client itself."""
    request_id: str | None = None
    """Id of the request in the server's log, if the server sent one."""

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message: str = message
        self.hint: str | None = hint
        self.details: dict[str, Any] = details

        if isinstance(self, OSError):
            # The built-in class has slots of the same names, which would hide the details.
            number = details.get("errno", self.usual_errno)
            text = None if number is None else os.strerror(number)
            for slot, fact in (("errno", number), ("filename", details.get("path")), ("strerror", text)):
                setattr(self, slot, fact)

    def __reduce__(self) -> tuple[Any, ...]:
        facts = (type(self), self.message, self.hint, self.details)
        return (
            _made_again,
            facts,
            {"http_status": self.http_status, "request_id": self.request_id, **_notes(self)},
        )

    def __str__(self) -> str:
        """Return the message and, if there is one, the hint: everything a traceback shows."""
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message

    def __getattr__(self, name: str) -> Any:
        details = self.__dict__.get("details", {})
        if name in details:
            return details[name]
        raise AttributeError(name)

    def to_json(self) -> dict[str, Any]:
        """Return the error as JSON; :func:`from_json` rebuilds it."""
        body: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.hint:
            body["hint"] = self.hint
        if self.details:
            body["details"] = self.details
        return body


def _made_again(
    kind: type[SandkeepError], message: str, hint: str | None, details: dict[str, Any]
) -> SandkeepError:
    return kind(message, hint=hint, **details)


def _notes(error: BaseException) -> dict[str, Any]:
    return {"__notes__": error.__notes__} if hasattr(error, "__notes__") else {}


class InvalidRequest(SandkeepError):
    """The caller's mistake; ``field`` names the argument, ``problem`` says what is wrong with it."""

    code = "invalid_request"


class TimeoutInvalid(InvalidRequest):
    """The session may not live that long; ``maximum`` is the longest lifetime, a ``timedelta``."""

    code = "timeout_invalid"

    @property
    def maximum(self) -> timedelta | None:
        """The longest a session may live; ``None`` if the server did not say."""
        most = self.details.get("maximum_ms")
        return None if most is None else timedelta(milliseconds=most)


class AccessDenied(SandkeepError):
    """The identity is valid but may not do this."""

    code = "access_denied"


class Unauthenticated(AccessDenied):
    """The request has no identity, or one that the server does not accept."""

    code = "unauthenticated"


class NotFound(SandkeepError):
    """Something does not exist; ``kind`` says what, ``name`` which one."""

    code = "not_found"


class SnapshotGone(NotFound):
    """The snapshot was deleted or has expired; ``snapshot`` is its id."""

    code = "snapshot_not_found"

    @property
    def snapshot(self) -> str | None:
        """The id of the snapshot."""
        return self.details.get("name")


class Conflict(SandkeepError):
    """The request clashes with something that exists."""

    code = "conflict"


class NameTaken(Conflict):
    """A sandbox or another object already has that ``name``."""

    code = "name_taken"


class ConfigurationDiffers(Conflict):
    """The sandbox exists with another configuration than requested; ``field``, ``found``, ``asked``."""

    code = "configuration_differs"


class DriveAttached(Conflict):
    """Another session has the ``drive`` mounted read-write."""

    code = "drive_attached"


class DriveNotInitialized(Conflict):
    """The ``drive`` was never mounted, so there is nothing to fork."""

    code = "drive_not_initialized"


class WrongState(SandkeepError):
    """The object exists, but its ``status`` does not allow this."""

    code = "wrong_state"


class SessionStopped(WrongState):
    """The ``session`` has ended."""

    code = "session_stopped"


class SessionStopping(WrongState):
    """The ``session`` is ending now."""

    code = "session_stopping"


class SessionSnapshotting(WrongState):
    """The ``session`` is being snapshotted and ends after that."""

    code = "session_snapshotting"


class LimitReached(SandkeepError):
    """A ``limit`` was reached; ``value`` is how much it allows."""

    code = "limit_reached"


class BodyTooLarge(LimitReached):
    """The request body has more bytes than ``limit``."""

    code = "body_too_large"


class RateLimited(LimitReached):
    """Too many requests; ``retry_after`` says in how many seconds to try again."""

    code = "rate_limited"


class HostCannot(SandkeepError):
    """This machine cannot do it; ``part`` says what is missing, ``why`` gives the reason."""

    code = "host_cannot"


class IsolationUnavailable(HostCannot):
    """An isolation barrier is missing on this machine, and the caller did not accept that."""

    code = "isolation_unavailable"


class LimitUnenforceable(HostCannot):
    """A resource limit was requested that this machine cannot enforce."""

    code = "limit_unenforceable"


class PathError(SandkeepError):
    """A file operation failed; ``path``, ``errno``, ``operation``.

    The five subclasses for which Python has a class of its own are also that class, and so an ``OSError``.
    The others, among them :class:`NoSpace`, are not: ``except PathError`` catches every failure of a file in
    a sandbox; ``except OSError`` catches those five and failures of local files.
    """

    code = "path_error"


class PathNotFound(PathError, FileNotFoundError):
    """Nothing is at ``path``; also a ``FileNotFoundError``."""

    code = "path_not_found"
    usual_errno: ClassVar[int | None] = _errno.ENOENT


class PathExists(PathError, FileExistsError):
    """Something is already at ``path``, or in that directory; also a ``FileExistsError``."""

    code = "path_exists"
    usual_errno: ClassVar[int | None] = _errno.EEXIST


class NotDirectory(PathError, NotADirectoryError):
    """A part of ``path`` is not a directory; also a ``NotADirectoryError``."""

    code = "not_a_directory"
    usual_errno: ClassVar[int | None] = _errno.ENOTDIR


class IsDirectory(PathError, IsADirectoryError):
    """``path`` is a directory where a file is needed; also an ``IsADirectoryError``."""

    code = "is_a_directory"
    usual_errno: ClassVar[int | None] = _errno.EISDIR


class NotRegularFile(PathError):
    """``path`` is a FIFO, a device or a socket where a file is needed."""

    code = "not_a_regular_file"


class PathPermission(PathError, PermissionError):
    """The user may not do that with ``path``; also a ``PermissionError``."""

    code = "permission_denied"
    usual_errno: ClassVar[int | None] = _errno.EACCES


class NoSpace(PathError):
    """The disk under ``path`` is full."""

    code = "no_space"


class ArchiveError(PathError):
    """An archive or tree failed; ``path`` and ``entry`` say where, ``entries`` how many are in place.

    If one path failed in a way that a single-file operation can fail too, the error has the class of that
    operation instead, such as :class:`PathPermission`, with the same attributes.
    """

    code = "archive_error"

    @property
    def path(self) -> str | None:
        """The path that failed, if it is known."""
        return self.details.get("path")


class ProcessError(SandkeepError):
    """A process cannot be started, reached or completed."""

    code = "process_error"


class ExecutableNotFound(ProcessError):
    """There is no program called ``command``; ``process`` is the record of the attempt."""

    code = "executable_not_found"


class ExecutableRefused(ProcessError):
    """The program exists, but the kernel refuses to run it; ``process`` is the record of the attempt."""

    code = "executable_refused"


class StdinUnavailable(ProcessError):
    """Standard input was never attached, is closed, or the process no longer reads it."""

    code = "stdin_unavailable"


class StdinStalled(ProcessError):
    """The process does not read its input at the moment; ``bytes_written`` have arrived."""

    code = "stdin_stalled"


class ProcessFailed(ProcessError):
    """The exit code is not 0; ``command``, ``returncode``, ``reason``, ``duration``, the end of output."""

    code = "process_failed"


class ProcessTimeout(ProcessError):
    """The process did not end in time; ``command``, ``timeout``, ``reason``, and its output so far."""

    code = "process_timeout"


class OutputDamaged(ProcessError):
    """Part of a process's log is damaged on disk; ``process``, ``offset``, ``length``."""

    code = "output_damaged"


class ImageError(SandkeepError):
    """An ``image`` cannot be resolved, fetched, verified or unpacked."""

    code = "image_error"


class LayerError(SandkeepError):
    """The layer store is damaged or inconsistent; ``layer``."""

    code = "layer_error"


class StoreError(SandkeepError):
    """The metadata database at ``path`` cannot be used."""

    code = "store_error"


class SchemaTooNew(StoreError):
    """A newer sandkeep wrote the database: its schema is ``found``, this version knows up to ``known``."""

    code = "schema_too_new"


class StoreMismatch(StoreError):
    """The database does not know the layers and sessions beside it; ``found`` says why."""

    code = "store_mismatch"


class TransportError(SandkeepError):
    """The connection failed, or the peer did not speak our protocol."""

    code = "transport_error"


class StreamClosed(TransportError):
    """The session was lost in the middle of a stream."""

    code = "stream_closed"


class ServerUnreachable(TransportError):
    """No server listens there, and none could be started; nothing was sent."""

    code = "server_unreachable"


class RequestTimeout(TransportError):
    """The server did not respond in time; it may or may not have carried out the request."""

    code = "request_timeout"


class InternalError(SandkeepError):
    """A bug in sandkeep."""

    code = "internal_error"


_PATH_ERRORS: dict[int, type[PathError]] = {
    _errno.ENOENT: PathNotFound,
    _errno.EEXIST: PathExists,
    _errno.ENOTEMPTY: PathExists,
    _errno.ENOTDIR: NotDirectory,
    _errno.EISDIR: IsDirectory,
    _errno.EACCES: PathPermission,
    _errno.EPERM: PathPermission,
    _errno.EROFS: PathPermission,
    _errno.ENOSPC: NoSpace,
    _errno.EDQUOT: NoSpace,
}


def path_error_kind(number: int) -> type[PathError]:
    """Return the class for an errno that a path operation failed with."""
    return _PATH_ERRORS.get(number, PathError)


def path_error(error: OSError, operation: str, path: str | bytes, *, problem: str | None = None) -> PathError:
    """Return the typed form of a failed file operation; ``problem`` replaces the kernel's words."""
    number = error.errno or 0
    text = os.fsdecode(path)
    kind = path_error_kind(number)
    return kind(
        f"{operation} {text}: {problem or os.strerror(number)}", path=text, errno=number, operation=operation
    )


def files_exhausted(error: BaseException) -> LimitReached | None:
    """Return the typed form of "too many open files"; ``None`` for any other error."""
    if not isinstance(error, OSError) or error.errno not in (_errno.EMFILE, _errno.ENFILE):
        return None
    return LimitReached(
        f"too many open files: {os.strerror(error.errno)}",
        limit="open files",
        hint="raise the server's limit of open files (LimitNOFILE= of its unit, ulimit -n), "
        "or use fewer sandboxes and connections at once",
    )


def _walk(cls: type[SandkeepError]) -> dict[str, type[SandkeepError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found.update(_walk(child))
    return found


_BY_CODE: dict[str, type[SandkeepError]] = {**_walk(SandkeepError), "snapshot_gone": SnapshotGone}
"""Classes by code; the last entry is a code that earlier servers send."""


def from_json(body: dict[str, Any]) -> SandkeepError:
    """Rebuild an error from ``to_json``; an unknown code becomes the root class with the same text."""
    kind = _BY_CODE.get(str(body.get("code")), SandkeepError)
    details = body.get("details") or {}
    return kind(str(body.get("message", "unknown error")), hint=body.get("hint"), **details)
