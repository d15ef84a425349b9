"""File operations for clients: arguments in, data frames and one response out.

Runs on a thread that was lent the client's connection. An operation that takes data reads all of it before
it responds, also when it fails half-way: the client then reads the error instead of a broken connection.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from sandkeep.errors import InternalError, InvalidRequest, SandkeepError
from sandkeep.shared import protocol
from sandkeep.shared.tarreader import TarReader
from sandkeep.shared.tarwriter import TarWriter
from sandkeep.supervisor.archive import archive, archive_entries
from sandkeep.supervisor.atomicwrite import ReadContent
from sandkeep.supervisor.comparing import list_tree, remove_entries
from sandkeep.supervisor.connection import LentSocket
from sandkeep.supervisor.direct import DirectSocket, DirectUpload
from sandkeep.supervisor.extract import extract
from sandkeep.supervisor.files import SessionFiles
from sandkeep.supervisor.identity import Identity
from sandkeep.supervisor.inotify import Watcher
from sandkeep.supervisor.lines import MAX_BYTES, read_lines
from sandkeep.supervisor.tree import Fd

_READ_BYTES: Final = 1 << 20


class Call:
    """One operation that is running."""

    def __init__(
        self,
        files: SessionFiles,
        stream: LentSocket,
        request: Any,
        body: dict[str, Any],
        identity: Identity,
        cwd: str,
    ) -> None:
        self.files = files
        self.stream = stream
        self.request = request
        self.incoming: DirectUpload | None = None
        self.body = body
        self.identity = identity
        self.cwd = cwd

    def text(self, name: str) -> str:
        value = self.body.get(name)
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{name} must be a path", field=name)
        return value

    def texts(self, name: str) -> list[str]:
        value = self.body.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InvalidRequest(f"{name} must be a list of strings", field=name)
        return value

    def number(self, name: str, default: int | None = None) -> int | None:
        value = self.body.get(name, default)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise InvalidRequest(f"{name} must be a number", field=name)
        return value

    def integer(self, name: str, default: int) -> int:
        value = self.number(name, default)
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name, default)
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name} must be true or false", field=name)
        return value

    def passage(self, **facts: Any) -> tuple[DirectSocket, int]:
        """Return the client's socket and how many bytes on it are content."""
        sock, said = self.stream.take_socket(self.request, facts)
        return DirectSocket(sock, self.stream.sock), int(said["left"])

    def source(self) -> ReadContent:
        if not self.flag("direct"):
            return self.stream.read
        self.incoming = DirectUpload(self.passage, self.stream.read)
        return self.incoming

    def skip_input(self) -> None:
        if self.incoming is not None:
            self.incoming.skip()
        else:
            self.stream.skip_input()

    def close(self) -> None:
        if self.incoming is not None:
            self.incoming.close()


def serve(
    stream: LentSocket,
    request: Any,
    op: str,
    body: dict[str, Any],
    identity: Identity,
    files: SessionFiles,
    cwd: str,
) -> None:
    """Run one operation and send its response."""
    call = Call(files, stream, request, body, identity, cwd)
    try:
        _serve(call, op)
    finally:
        call.close()


def _serve(call: Call, op: str) -> None:
    stream, request = call.stream, call.request
    try:
        operation = _OPERATIONS.get(op)
        if operation is None:
            raise InvalidRequest(f"unknown operation fs.{op}", field="op")
        result = operation(call)
    except SandkeepError as error:
        failure = error
    except (OSError, protocol.ProtocolError):
        raise
    except Exception as error:
        failure = InternalError(f"fs.{op}: {type(error).__name__}: {error}")
    else:
        stream.answer(request, result)
        return
    if op in _TAKES_DATA:
        call.skip_input()
    stream.refuse(request, failure)


def _stat(call: Call) -> dict[str, Any]:
    found = call.files.stat(call.text("path"), call.identity, cwd=call.cwd, follow=call.flag("follow", True))
    return found._asdict()


def _list(call: Call) -> dict[str, Any]:
    entries = call.files.listdir(call.text("path"), call.identity, cwd=call.cwd)
    # Sent as data: a directory may be larger than a frame of JSON.
    for start in range(0, len(entries), 1000):
        chunk = [entry._asdict() for entry in entries[start : start + 1000]]
        call.stream.write(protocol.encode_json_line(chunk))
    return {"count": len(entries)}


def _read(call: Call) -> dict[str, Any]:
    opened = call.files.open_read(
        call.text("path"),
        call.identity,
        cwd=call.cwd,
        offset=call.number("offset", 0) or 0,
        length=call.number("length"),
    )
    try:
        direct = call.number("direct")
        if direct is not None and opened.length >= direct:
            passage, _ = call.passage(length=opened.length)
            try:
                sent = passage.send_file(opened.fd, opened.offset, opened.length)
            finally:
                passage.close()
            return {"size": opened.size, "sent": sent}
        left, position = opened.length, opened.offset
        while left > 0:
            # Read before the size is sent: a small file may be rewritten at the same time.
            chunk = os.pread(opened.fd, min(left, _READ_BYTES), position)
            if not chunk:
                break
            call.stream.write(chunk)
            left -= len(chunk)
            position += len(chunk)
        return {"size": opened.size, "sent": position - opened.offset}
    finally:
        os.close(opened.fd)


def _lines(call: Call) -> dict[str, Any]:
    opened = call.files.open_read(call.text("path"), call.identity, cwd=call.cwd)
    with Fd(opened.fd) as fd:
        found = read_lines(
            fd,
            start=call.integer("start", 1),
            limit=call.integer("limit", MAX_BYTES),
            max_bytes=call.integer("max_bytes", MAX_BYTES),
        )
    if found.data:
        call.stream.write(found.data)
    return {"lines": found.lines, "more": found.more, "cut": found.cut}


def _write(call: Call) -> dict[str, Any]:
    written = call.files.write(
        call.text("path"),
        call.source(),
        call.identity,
        cwd=call.cwd,
        mode=call.number("mode"),
        parents=call.flag("parents"),
        append=call.flag("append"),
        exclusive=call.flag("exclusive"),
        size=call.number("size"),
    )
    return {"bytes_written": written}


def _mkdir(call: Call) -> dict[str, Any]:
    call.files.mkdir(
        call.text("path"),
        call.identity,
        cwd=call.cwd,
        mode=call.number("mode", 0o755) or 0,
        parents=call.flag("parents"),
    )
    return {}


def _rename(call: Call) -> dict[str, Any]:
    call.files.rename(
        call.text("path"),
        call.text("target"),
        call.identity,
        cwd=call.cwd,
        replace=call.flag("replace", True),
    )
    return {}


def _remove(call: Call) -> dict[str, Any]:
    call.files.remove(
        call.text("path"),
        call.identity,
        cwd=call.cwd,
        recursive=call.flag("recursive"),
        missing_ok=call.flag("missing_ok"),
    )
    return {}


def _symlink(call: Call) -> dict[str, Any]:
    call.files.symlink(call.text("target"), call.text("path"), call.identity, cwd=call.cwd)
    return {}


def _readlink(call: Call) -> dict[str, Any]:
    return {"target": call.files.readlink(call.text("path"), call.identity, cwd=call.cwd)}


def _realpath(call: Call) -> dict[str, Any]:
    path = call.text("path")
    return {"path": call.files.realpath(path, call.identity, cwd=call.cwd, strict=call.flag("strict"))}


def _chmod(call: Call) -> dict[str, Any]:
    mode = call.number("mode")
    if mode is None:
        raise InvalidRequest("mode must be a number", field="mode")
    call.files.chmod(call.text("path"), mode, call.identity, cwd=call.cwd)
    return {}


def _chown(call: Call) -> dict[str, Any]:
    uid, gid = call.number("uid", -1), call.number("gid", -1)
    call.files.chown(
        call.text("path"),
        -1 if uid is None else uid,
        -1 if gid is None else gid,
        call.identity,
        cwd=call.cwd,
        follow=call.flag("follow", True),
    )
    return {}


def _copy(call: Call) -> dict[str, Any]:
    written = call.files.copy(
        call.text("path"), call.text("target"), call.identity, cwd=call.cwd, parents=call.flag("parents")
    )
    return {"bytes_written": written}


def _extract(call: Call, *, exact: bool = False) -> dict[str, Any]:
    entries = extract(
        call.files,
        TarReader(call.stream.read),
        call.text("path"),
        call.identity,
        cwd=call.cwd,
        keep_owner=call.flag("keep_owner"),
        exact=exact,
    )
    return {"entries": entries}


def _tree(call: Call) -> dict[str, Any]:
    count = list_tree(
        call.files,
        call.text("path"),
        call.identity,
        lambda entries: call.stream.write(protocol.encode_json_line(entries)),
        cwd=call.cwd,
        ignore=call.texts("ignore"),
        checksum=call.flag("checksum"),
    )
    return {"count": count}


def _tree_remove(call: Call) -> dict[str, Any]:
    kept = remove_entries(call.files, call.text("path"), call.identity, call.texts("names"), cwd=call.cwd)
    return {"kept": kept}


def _tree_archive(call: Call) -> dict[str, Any]:
    writer = TarWriter(call.stream.write)
    path, names = call.text("path"), call.texts("names")
    return archive_entries(call.files, path, names, writer, call.identity, cwd=call.cwd)._asdict()


def _archive(call: Call) -> dict[str, Any]:
    done = archive(
        call.files,
        call.texts("paths"),
        TarWriter(call.stream.write),
        call.identity,
        cwd=call.cwd,
        ignore=call.texts("ignore"),
    )
    return done._asdict()


def _watch(call: Call) -> dict[str, Any]:
    watcher = Watcher(
        call.files, call.text("path"), call.identity, cwd=call.cwd, recursive=call.flag("recursive", True)
    )
    try:
        # An empty message first: it says that no later change is missed.
        call.stream.write(protocol.encode_json_line([]))
        call.stream.sock.settimeout(None)
        watcher.run(
            call.stream.sock.fileno(), lambda changes: call.stream.write(protocol.encode_json_line(changes))
        )
    finally:
        watcher.close()
    return {}


_OPERATIONS: Final[dict[str, Callable[[Call], dict[str, Any]]]] = {
    "stat": _stat,
    "list": _list,
    "read": _read,
    "lines": _lines,
    "write": _write,
    "mkdir": _mkdir,
    "rename": _rename,
    "remove": _remove,
    "symlink": _symlink,
    "readlink": _readlink,
    "realpath": _realpath,
    "chmod": _chmod,
    "chown": _chown,
    "copy": _copy,
    "extract": _extract,
    "archive": _archive,
    "tree": _tree,
    "tree_remove": _tree_remove,
    "tree_archive": _tree_archive,
    "tree_extract": partial(_extract, exact=True),
    "watch": _watch,
}
_TAKES_DATA: Final = frozenset({"write", "extract", "tree_extract"})
