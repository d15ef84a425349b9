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
    │   ├── IsolationUnavailable    a barrier cannot be had and nobody accepted its absence
    │   └── LimitUnenforceable      a resource limit was asked for and cannot be enforced
    ├── PathError               a file operation; ``path``, ``errno``, ``operation``
    │   ├── PathNotFound
    │   ├── PathExists
    │   ├── NotDirectory
    │   ├── IsDirectory
    │   ├── NotRegularFile      a FIFO, device or socket where a file was meant
    │   ├── PathPermission
    │   ├── NoSpace
    │   └── ArchiveError        an archive entry; ``entry`` and how many entries are in place
    ├── ProcessError
    │   ├── ExecutableNotFound  ``command``
    │   ├── ExecutableRefused   found, but the kernel will not run it
    │   ├── StdinUnavailable    never attached, closed, or nobody reads any more
    │   ├── StdinStalled        the process has stopped taking input for now; ``bytes_written``
    │   ├── ProcessFailed       it ended with another code than 0; ``command``, ``returncode``, output
    │   └── ProcessTimeout      it had not ended in the time given; ``command``, ``timeout``, output so far
    ├── ImageError              an image cannot be resolved, fetched, verified or unpacked; ``image``
    ├── LayerError              the layer store is not as it must be; ``layer``
    ├── StoreError              the metadata database cannot be used; ``path``
    │   └── SchemaTooNew        a newer sandkeep wrote it; ``found`` and ``known``
    ├── TransportError          the other side went away or spoke another protocol
    │   ├── StreamClosed        contact with the session was lost in the middle of a stream
    │   ├── ServerUnreachable   nobody listens there, or none could be started; nothing was sent
    │   └── RequestTimeout      no answer in time; whether it was carried out is not known
    └── InternalError           our bug

Facts are attributes, prose is the message; code never parses messages. ``code`` is the stable spelling used
on every wire, ``hint`` says what to do next. This module imports nothing outside the standard library: the
supervisor uses it too.
"""

from __future__ import annotations

import errno as _errno
import os
from typing import Any, ClassVar


class SandkeepError(Exception):
    """Root of the tree. Keyword facts become attributes and travel as ``details``."""

    code: ClassVar[str] = "error"
    http_status: int | None = None
    """The HTTP status a server answered with; ``None`` for an error found on this side."""

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message: str = message
        self.hint: str | None = hint
        self.details: dict[str, Any] = details

    def __getattr__(self, name: str) -> Any:
        details = self.__dict__.get("details", {})
        if name in details:
            return details[name]
        raise AttributeError(name)

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.hint:
            body["hint"] = self.hint
        if self.details:
            body["details"] = self.details
        return body


class InvalidRequest(SandkeepError):
    code = "invalid_request"


class TimeoutInvalid(InvalidRequest):
    code = "timeout_invalid"


class AccessDenied(SandkeepError):
    code = "access_denied"


class Unauthenticated(AccessDenied):
    code = "unauthenticated"


class NotFound(SandkeepError):
    code = "not_found"


class SnapshotGone(NotFound):
    code = "snapshot_gone"


class Conflict(SandkeepError):
    code = "conflict"


class NameTaken(Conflict):
    code = "name_taken"


class DriveAttached(Conflict):
    code = "drive_attached"


class DriveNotInitialized(Conflict):
    code = "drive_not_initialized"


class WrongState(SandkeepError):
    code = "wrong_state"


class SessionStopped(WrongState):
    code = "session_stopped"


class SessionStopping(WrongState):
    code = "session_stopping"


class SessionSnapshotting(WrongState):
    code = "session_snapshotting"


class LimitReached(SandkeepError):
    code = "limit_reached"


class BodyTooLarge(LimitReached):
    code = "body_too_large"


class RateLimited(LimitReached):
    code = "rate_limited"


class HostCannot(SandkeepError):
    code = "host_cannot"


class IsolationUnavailable(HostCannot):
    code = "isolation_unavailable"


class LimitUnenforceable(HostCannot):
    code = "limit_unenforceable"


class PathError(SandkeepError):
    code = "path_error"


class PathNotFound(PathError):
    code = "path_not_found"


class PathExists(PathError):
    code = "path_exists"


class NotDirectory(PathError):
    code = "not_a_directory"


class IsDirectory(PathError):
    code = "is_a_directory"


class NotRegularFile(PathError):
    code = "not_a_regular_file"


class PathPermission(PathError):
    code = "permission_denied"


class NoSpace(PathError):
    code = "no_space"


class ArchiveError(PathError):
    code = "archive_error"


class ProcessError(SandkeepError):
    code = "process_error"


class ExecutableNotFound(ProcessError):
    code = "executable_not_found"


class ExecutableRefused(ProcessError):
    code = "executable_refused"


class StdinUnavailable(ProcessError):
    code = "stdin_unavailable"


class StdinStalled(ProcessError):
    code = "stdin_stalled"


class ProcessFailed(ProcessError):
    code = "process_failed"


class ProcessTimeout(ProcessError):
    code = "process_timeout"


class ImageError(SandkeepError):
    code = "image_error"


class LayerError(SandkeepError):
    code = "layer_error"


class StoreError(SandkeepError):
    code = "store_error"


class SchemaTooNew(StoreError):
    code = "schema_too_new"


class TransportError(SandkeepError):
    code = "transport_error"


class StreamClosed(TransportError):
    code = "stream_closed"


class ServerUnreachable(TransportError):
    code = "server_unreachable"


class RequestTimeout(TransportError):
    code = "request_timeout"


class InternalError(SandkeepError):
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


def path_error(error: OSError, operation: str, path: str | bytes, *, problem: str | None = None) -> PathError:
    """The typed form of a failed file operation, with the kernel's words in the message or better ones."""
    number = error.errno or 0
    text = os.fsdecode(path)
    kind = _PATH_ERRORS.get(number, PathError)
    return kind(
        f"{operation} {text}: {problem or os.strerror(number)}", path=text, errno=number, operation=operation
    )


def _walk(cls: type[SandkeepError]) -> dict[str, type[SandkeepError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found.update(_walk(child))
    return found


_BY_CODE = _walk(SandkeepError)


def from_json(body: dict[str, Any]) -> SandkeepError:
    """Rebuild an error from ``to_json``; an unknown code keeps its text under the root class."""
    kind = _BY_CODE.get(str(body.get("code")), SandkeepError)
    details = body.get("details") or {}
    return kind(str(body.get("message", "unknown error")), hint=body.get("hint"), **details)
