"""Streams of NDJSON records, and the text of a process's output.

Records are ASCII: some clients decode every network chunk on its own, so a character of several bytes could
be torn in two. The text of a stream is the same however its bytes were cut into chunks, because a client that
reconnects skips the number of characters it already has.
"""

from __future__ import annotations

import json
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii
from typing import Any

import msgspec

from sandkeep.types import OutputStream
from sandkeep.wire.base import encode
from sandkeep.wire.objects import CommandObject

CONTENT_TYPE = "application/x-ndjson"
"""Exactly this: with a charset after it some clients fail."""
HEARTBEAT = b"\n"
"""An empty line, which every client skips."""

_PREFIX = {stream: f'{{"stream":"{stream.value}","data":'.encode() for stream in OutputStream}
_TEXT = msgspec.json.Encoder()
_UTF8 = getincrementaldecoder("utf-8")


def record(value: Any) -> bytes:
    """One line of JSON in ASCII."""
    data = encode(value)
    if not data.isascii():
        data = json.dumps(msgspec.json.decode(data), separators=(",", ":")).encode()
    return data + b"\n"


def command_record(command: CommandObject) -> bytes:
    """First and last in the answer to a waiting run."""
    return record({"command": command})


def output_record(stream: OutputStream, text: str) -> bytes:
    """A piece of output. The hottest line of the server, so it is put together by hand."""
    if text.isascii():
        return _PREFIX[stream] + _TEXT.encode(text) + b"}\n"
    return _PREFIX[stream] + encode_basestring_ascii(text).encode("ascii") + b"}\n"


def error_record(code: str, message: str) -> bytes:
    """What went wrong after the answer had begun; nothing follows it."""
    return record({"stream": "error", "data": {"code": code, "message": message}})


class OutputText:
    """The text of both streams of one process. Invalid bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoders: dict[OutputStream, IncrementalDecoder] = {}

    def feed(self, stream: OutputStream, data: bytes) -> str:
        """The text that is complete now; the start of a character waits for its end."""
        decoder = self._decoders.get(stream)
        if decoder is None:
            decoder = self._decoders[stream] = _UTF8("replace")
        return decoder.decode(data)

    def finish(self) -> Iterator[tuple[OutputStream, str]]:
        """What is left when the process has ended: characters that never were completed."""
        for stream, decoder in self._decoders.items():
            text = decoder.decode(b"", True)
            if text:
                yield stream, text
