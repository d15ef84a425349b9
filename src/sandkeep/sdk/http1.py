"""HTTP/1.1 as clients speak it over a unix socket, without I/O: requests to bytes, bytes to answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import httptools

from sandkeep.errors import TransportError

LAST_CHUNK: Final = b"0\r\n\r\n"


def head(method: str, target: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A request up to its body. Nothing in it may break a line: it would begin another header."""
    lines = [f"{method} {target} HTTP/1.1".encode("ascii"), *(b"%b: %b" % header for header in headers)]
    if any(b"\n" in line or b"\r" in line or b"\0" in line for line in lines):
        raise TransportError("a header has a line break in it")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class AnswerParser:
    """One answer. Feed it what arrives; take the body away in between."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status: int = 0
        self.headers: dict[str, str] = {}
        self.started: bool = False
        """The head is complete."""
        self.complete: bool = False
        self.left: int | None = None
        """How much of the body has not come yet, if the head says how long it is."""
        self._kept = False
        self._body: list[bytes] = []

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise TransportError(f"the server's answer cannot be read: {error}") from error

    def end(self) -> None:
        """The connection was closed, which ends an answer that does not say how long it is."""
        told = self.headers.keys() & {"content-length", "transfer-encoding"}
        if not self.started or told:
            raise TransportError("the connection to the server was lost")
        self.complete = True

    def taken(self) -> None:
        """What is left of the body was read by somebody else."""
        self.left = 0
        self.complete = True

    def body(self) -> list[bytes]:
        pieces, self._body = self._body, []
        return pieces

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
            self.headers.clear()  # an interim answer; the real one follows
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
