"""Where the client puts the output of ``run_process``: into the result, a file, a stream, or nowhere.

The arguments and constants are those of ``subprocess``. Bytes are passed on unchanged as soon as they arrive,
and exactly once, even if a connection is lost on the way.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import IO, Any, Final, Protocol, TypeAlias

from sandkeep.checks import expect, refuse
from sandkeep.errors import InvalidRequest, OutputDamaged
from sandkeep.sdk.values import OutputChunk, OutputGap
from sandkeep.states import OutputStream


class Writable(Protocol):
    """An object that bytes are written to."""

    def write(self, data: bytes, /) -> object: ...


OutputTarget: TypeAlias = int | str | os.PathLike[str] | IO[bytes] | IO[str] | Writable
"""Target of output: ``subprocess.PIPE``, ``DEVNULL`` or, for standard error, ``STDOUT`` or ``"stdout"``; the
path of a local file, which is replaced; a file descriptor; or an object with ``write`` for bytes. For a text
file the bytes are written to its underlying buffer."""

_PIPE, _STDOUT, _DEVNULL = -1, -2, -3
"""The constants of ``subprocess``, copied because importing that module is slow."""

_Write = Callable[[bytes], None]
_NOWHERE: Final = None


class Capture:
    """The bytes of one stream: all of them, or up to a limit the first half of that and the last."""

    __slots__ = ("_first", "_head", "_last", "_tail", "size")

    def __init__(self, limit: int | None = None) -> None:
        self._first = None if limit is None else limit - limit // 2
        self._last = 0 if limit is None else limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.size: int = 0
        """Bytes that were written, kept or not."""

    def write(self, data: bytes) -> None:
        self.size += len(data)
        if self._first is None:
            self._head += data
            return
        room = self._first - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        # Moving bytes costs as much as they are, so it is done once for as many again.
        if len(self._tail) > 2 * self._last:
            del self._tail[: len(self._tail) - self._last]

    def value(self) -> bytes:
        return bytes(self._head) + bytes(self._tail[max(len(self._tail) - self._last, 0) :])

    @property
    def omitted(self) -> int:
        """Bytes that were written and not kept."""
        return self.size - len(self._head) - min(len(self._tail), self._last)


class Outlets:
    """The targets of both streams of one process. As a context manager it closes the files that it opened."""

    def __init__(
        self,
        stdout: OutputTarget | None,
        stderr: OutputTarget | None,
        *,
        capture_output: bool,
        max_output: int | None = None,
    ) -> None:
        """Check the arguments; nothing is opened yet.

        Raises:
            InvalidRequest: an argument is invalid; ``field`` names it.
        """
        if stderr == "stdout":
            stderr = _STDOUT
        self.merged: bool = _is(stderr, _STDOUT)
        """The process has one pipe for both streams; all its output is standard output."""
        if capture_output:
            for name, target in (("stdout", stdout), ("stderr", None if self.merged else stderr)):
                if target is not None:
                    refuse(
                        "capture_output",
                        f"excludes {name}; use subprocess.PIPE to capture one stream",
                    )
            stdout, stderr = _PIPE, stderr if self.merged else _PIPE
        _check("stdout", stdout)
        _check("stderr", stderr)
        if _path(stdout) is not None and _path(stdout) == _path(stderr):
            refuse("stderr", "is the same file as stdout; use subprocess.STDOUT to write both there")
        self._targets = {OutputStream.STDOUT: stdout, OutputStream.STDERR: stderr}
        self._writes: dict[OutputStream, _Write | None] = {}
        self._captured: dict[OutputStream, Capture] = {}
        self._dropped = 0
        """Bytes that the server had dropped from the log before they were read."""
        self._held = ExitStack()
        self._failure: BaseException | None = None
        for stream, target in self._targets.items():
            if _is(target, _PIPE):
                self._captured[stream] = Capture(max_output)
        if max_output is not None:
            expect("max_output", max_output, int, "a number of bytes")
            if max_output < 1:
                refuse("max_output", f"must be at least 1, not {max_output}")
            if not self._captured:
                refuse("max_output", "is for captured output: use capture_output or subprocess.PIPE")

    @property
    def wanted(self) -> bool:
        """Whether any output is used."""
        return any(not _nowhere(target) for target in self._targets.values())

    @property
    def collected(self) -> bool:
        """Whether output is only returned at the end, each stream separately."""
        return all(
            _is(target, _PIPE) or _nowhere(target)
            for stream, target in self._targets.items()
            if not (self.merged and stream is OutputStream.STDERR)
        )

    def captured(self, stream: OutputStream) -> bytes | None:
        """Return the captured bytes of a stream; ``None`` if it was not captured."""
        found = self._captured.get(stream)
        return None if found is None else found.value()

    @property
    def omitted(self) -> int:
        """Bytes of the captured streams that are not in the result."""
        return self._dropped + sum(each.omitted for each in self._captured.values())

    def caused(self, error: BaseException) -> bool:
        """Whether an error was raised by a target, such as a broken pipe or socket."""
        return error is self._failure

    def facts(self) -> dict[str, Any]:
        """Return what was captured so far, as attributes for an error."""
        streams = {stream.value: found.value() for stream, found in self._captured.items()}
        return {**streams, "omitted_bytes": self.omitted} if streams else {}

    def __enter__(self) -> Outlets:
        with ExitStack() as opened:
            for stream, target in self._targets.items():
                if _is(target, _STDOUT):
                    self._writes[stream] = self._writes[OutputStream.STDOUT]
                elif _is(target, _PIPE):
                    self._writes[stream] = self._captured[stream].write
                else:
                    self._writes[stream] = _NOWHERE if _nowhere(target) else _writer(target, opened)
            self._held = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def take(self, item: OutputChunk | OutputGap) -> None:
        """Pass on a chunk of output.

        Raises:
            OutputDamaged: a part of the output no longer exists.
        """
        if isinstance(item, OutputChunk):
            write = self._writes[item.stream]
            if write is not None:
                try:
                    write(item.data)
                except BaseException as error:
                    self._failure = error
                    raise
        elif self.collected and item.reason == "dropped":
            self._dropped += item.length
        else:
            why = "was dropped: the process wrote more than the server keeps, before it was read"
            raise OutputDamaged(
                f"output {why if item.reason == 'dropped' else 'is damaged on the disk of the server'}",
                hint="Process.output() returns the rest, with gaps",
                offset=item.offset,
                length=item.length,
            )


def _is(target: OutputTarget | None, constant: int) -> bool:
    return isinstance(target, int) and target == constant


def _nowhere(target: OutputTarget | None) -> bool:
    return target is None or _is(target, _DEVNULL)


def _path(target: OutputTarget | None) -> str | None:
    if not isinstance(target, str | os.PathLike):
        return None
    return os.path.realpath(os.fspath(target))


def _check(name: str, target: OutputTarget | None) -> None:
    """Refuse a target that cannot be written to, before anything is started."""
    if target is None or isinstance(target, str | os.PathLike):
        if isinstance(target, str) and not target:
            refuse(name, "must not be empty")
        return
    if isinstance(target, bool):
        refuse(name, "must not be True or False; use subprocess.PIPE to capture")
    if isinstance(target, int):
        if _is(target, _STDOUT) and name == "stdout":
            refuse(name, "cannot be subprocess.STDOUT, which is for stderr only")
        if target < _DEVNULL:
            refuse(name, "must be a file descriptor or a constant of subprocess")
        return
    write = getattr(target, "write", None)
    if not callable(write):
        refuse(name, "must be a constant of subprocess, a path, a file descriptor, or have write() for bytes")
    if inspect.iscoroutinefunction(write):
        refuse(name, "has an async write(); pass a file with an ordinary write()")
    if isinstance(target, io.TextIOBase) and getattr(target, "buffer", None) is None:
        refuse(name, "accepts text only, but output is bytes; use io.BytesIO or a file")


def _writer(target: Any, opened: ExitStack) -> _Write:
    if isinstance(target, str | os.PathLike):
        target = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        opened.callback(os.close, target)
    if isinstance(target, int):
        return lambda data: _all(lambda rest: os.write(target, rest), data)
    if isinstance(target, io.TextIOBase):
        target.flush()
        target = target.buffer  # type: ignore[attr-defined]
    flush = getattr(target, "flush", None)
    raw = isinstance(target, io.RawIOBase)

    def write(data: bytes) -> None:
        # An unbuffered file returns None if it took nothing.
        _all((lambda rest: target.write(rest) or 0) if raw else target.write, data)
        if flush is not None:
            flush()

    return write


def _all(write: Callable[[Any], Any], data: bytes) -> None:
    """Write everything to a target that may take less at once; one that returns no count took all."""
    left = memoryview(data)
    while left:
        # Not every object with write() accepts a memoryview.
        taken = write(data if len(left) == len(data) else bytes(left))
        if inspect.isawaitable(taken):
            if inspect.iscoroutine(taken):
                taken.close()
            raise InvalidRequest("the target has an async write(); pass a file with an ordinary write()")
        if not isinstance(taken, int) or isinstance(taken, bool):
            return
        if taken == 0:
            raise BlockingIOError("the target accepts no more bytes")
        left = left[taken:]
