"""Byte streams: decompression by magic number, and a reader that hashes the bytes it passes on.

A source is anything with ``read(n) -> bytes`` that may return fewer than ``n`` bytes at any time, and ``b""``
only at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import shutil
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol

from sandkeep.errors import ArchiveError, ImageError

CHUNK = 1 << 20
_SMALL_CHUNK = 1 << 10
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_UNREADABLE = {b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


class ByteSource(Protocol):
    def read(self, size: int, /) -> bytes: ...


@contextlib.contextmanager
def archive_errors() -> Iterator[None]:
    """Turn errors in an image's archive into an ``ImageError``."""
    try:
        yield
    except ArchiveError as error:
        raise ImageError(f"damaged archive: {error}", **error.details) from error


class Hashing:
    """Passes a source through, and keeps its SHA-256 and length."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self.length = 0

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self._hash.update(data)
        self.length += len(data)
        return data

    def drain(self) -> None:
        while self.read(CHUNK):
            pass

    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()


class Limited:
    """``size`` bytes of a file object from ``offset`` on. While it is read nothing else may use the file."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._file = file
        self._left = size
        file.seek(offset)

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data


class _Pushback:
    """A source whose first bytes were already read."""

    def __init__(self, head: bytes, source: ByteSource) -> None:
        self._head = head
        self._source = source

    def read(self, size: int) -> bytes:
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        return self._source.read(size)


class _Gzip:
    """zlib's decompressor with the interface of the others: it buffers the input it could not use yet."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


class _SmallChunks:
    """The same interface for a decompressor without an output limit: it gets little input at a time."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._data = b""
        self._at = 0

    def decompress(self, data: bytes, max_length: int) -> bytes:
        del max_length  # the inner decompressor has no limit; little input keeps its output small
        if data:
            self._data, self._at = data, 0
        chunk = self._data[self._at : self._at + _SMALL_CHUNK]
        self._at += len(chunk)
        plain: bytes = self._inner.decompress(chunk)
        return plain

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def needs_input(self) -> bool:
        return self._at == len(self._data)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data) + self._data[self._at :]


class _Decompressing:
    """Decompresses concatenated members with a factory of ``ZstdDecompressor``-like objects.

    Returns at most a chunk at a time: a few bytes of input may decompress to gigabytes.
    """

    def __init__(self, source: ByteSource, factory: Callable[[], Any], format_name: str) -> None:
        self._source = source
        self._factory = factory
        self._format = format_name
        self._member = factory()
        self._ready = b""
        self._fresh = True
        """Whether the current member has got no input yet, so that the input may end here."""

    def read(self, size: int) -> bytes:
        while not self._ready:
            if not self._fresh and not self._member.eof and not self._member.needs_input:
                self._ready = self._decompress(b"")
                continue
            leftover = self._member.unused_data if self._member.eof else b""
            if self._member.eof:
                self._member, self._fresh = self._factory(), True
            data = leftover or self._source.read(CHUNK)
            if not data or (self._fresh and not data.strip(b"\0")):
                if not data and not self._fresh:
                    raise ImageError(f"{self._format} data ends too early")
                if not data:
                    return b""
                continue  # zero padding after the last member
            self._fresh = False
            self._ready = self._decompress(data)
        out, self._ready = self._ready[:size], self._ready[size:]
        return out

    def _decompress(self, data: bytes) -> bytes:
        try:
            plain: bytes = self._member.decompress(data, CHUNK)
        except Exception as error:
            raise ImageError(f"damaged {self._format} data: {error}") from None
        return plain


@contextlib.contextmanager
def decompressed(source: ByteSource) -> Iterator[ByteSource]:
    """Yield the decompressed bytes of a gzip, zstd or uncompressed source."""
    head = b""
    while len(head) < 6 and (more := source.read(6 - len(head))):
        head += more
    whole = _Pushback(head, source)
    for magic, name in _UNREADABLE.items():
        if head.startswith(magic):
            raise ImageError(f"{name} compression is not supported", hint="use gzip, zstd or a plain archive")
    if head.startswith(_GZIP):
        yield _Decompressing(whole, _Gzip, "gzip")
    elif head.startswith(_ZSTD):
        factory = _zstd_factory()
        if factory is not None:
            yield _Decompressing(whole, factory, "zstd")
        else:
            with _zstd_program(whole) as plain:
                yield plain
    else:
        yield whole


def _zstd_factory() -> Callable[[], Any] | None:
    """Return a decompressor from whichever module this interpreter has."""
    for name in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ImportError):
            factory: Callable[[], Any] = importlib.import_module(name).ZstdDecompressor
            return factory
    with contextlib.suppress(ImportError):
        zstandard = importlib.import_module("zstandard")
        return lambda: _SmallChunks(zstandard.ZstdDecompressor().decompressobj())
    return None


@contextlib.contextmanager
def _zstd_program(source: ByteSource) -> Iterator[ByteSource]:
    program = shutil.which("zstd")
    if program is None:
        raise ImageError(
            "zstd data, and no decompressor for it", hint="pip install 'sandkeep[zstd]', or install zstd"
        )
    child = subprocess.Popen(
        [program, "-dcq"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin and child.stdout and child.stderr
    feeding = child.stdin
    failures: list[Exception] = []

    def feed() -> None:
        try:
            with feeding:
                while data := source.read(CHUNK):
                    feeding.write(data)
        except BrokenPipeError:
            pass  # the reader stopped early, or zstd died, which its exit code reports
        except Exception as error:
            failures.append(error)

    feeder = threading.Thread(target=feed, name="zstd-feeder", daemon=True)
    feeder.start()
    try:
        yield _ProgramOutput(child, failures)
    finally:
        child.stdout.close()
        child.kill()
        child.wait()
        feeder.join()
        child.stderr.close()


class _ProgramOutput:
    def __init__(self, child: subprocess.Popen[bytes], failures: list[Exception]) -> None:
        self._child = child
        self._failures = failures

    def read(self, size: int) -> bytes:
        assert self._child.stdout and self._child.stderr
        data = self._child.stdout.read(size)
        if not data:
            code = self._child.wait()
            if self._failures:
                raise self._failures[0]
            if code:
                detail = self._child.stderr.read(500).decode(errors="replace").strip()
                raise ImageError(f"damaged zstd data: {detail}")
        return data
