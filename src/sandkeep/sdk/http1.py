"""HTTP/1.1 for clients of a unix socket, without I/O: requests to bytes, bytes to responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import httptools

from sandkeep.errors import InvalidRequest, TransportError

LAST_CHUNK: Final = b"0\r\n\r\n"


def head(method: str, target: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return a request up to its body. A line break in a value is refused: it would begin another header."""
    lines = [f"{method} {target} HTTP/1.1".encode("ascii"), *(b"%b: %b" % header for header in headers)]
    if any(b"\n" in line or b"\r" in line or b"\0" in line for line in lines):
        raise InvalidRequest("the method, target or a header of the request contains a line break or NUL")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def frame_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class ResponseParser:
    """Parses one response. Feed it what arrives, and take the body parts with :meth:`body` in between."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status: int = 0
        self.headers: dict[str, str] = {}
        self.started: bool = False
        """The head is complete."""
        self.complete: bool = False
        self.left: int | None = None
        """Body bytes still to come, if the head states the length."""
        self._kept = False
        self._body: list[bytes] = []

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise TransportError(f"the server's response is not valid HTTP: {error}") from error

    def end(self) -> None:
        """The connection was closed, which ends a response without a stated length."""
        stated = self.headers.keys() & {"content-length", "transfer-encoding"}
        if not self.started or stated:
            raise TransportError("the connection to the server was lost")
        self.complete = True

    def mark_read(self) -> None:
        """Note that the rest of the body was read past this parser."""
        self.left = 0
        self.complete = True

    def body(self) -> list[bytes]:
        chunks, self._body = self._body, []
        return chunks

    @property
    def reusable(self) -> bool:
        """Whether the connection can carry another request."""
        return self.complete and self._kept

    # --- called by the parser ----------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()  # an interim response; the real one follows
            return
        self.status = status
        self.started = True
        if "transfer-encoding" not in self.headers and self.headers.get("content-length", "").isdigit():
            self.left = int(self.headers["content-length"])
        self._kept = bool(self._parser.should_keep_alive())

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        if self.left is not None:
            self.left -= len(data)

    def on_message_complete(self) -> None:
        self.complete = self.started
