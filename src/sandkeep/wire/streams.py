"""Streams of NDJSON records, and the text of a process's output.

Records are ASCII: some clients decode every network chunk separately, so a multi-byte character could be
split. The text of a stream is the same however its bytes were cut into chunks, because a client that
reconnects skips the number of characters it already has.
"""

from __future__ import annotations

import json
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii
from typing import Any

import msgspec

from sandkeep.states import OutputStream
from sandkeep.wire.base import encode
from sandkeep.wire.objects import CommandObject

CONTENT_TYPE = "application/x-ndjson"
"""Exactly this: some clients fail if a charset follows."""
HEARTBEAT = b"\n"
"""An empty line, which every client skips."""

_PREFIX = {stream: f'{{"stream":"{stream.value}","data":'.encode() for stream in OutputStream}
_TEXT = msgspec.json.Encoder()
_UTF8 = getincrementaldecoder("utf-8")


def record(value: Any) -> bytes:
    """Return one line of JSON in ASCII."""
    data = encode(value)
    if not data.isascii():
        data = json.dumps(msgspec.json.decode(data), separators=(",", ":")).encode()
    return data + b"\n"


def command_record(command: CommandObject) -> bytes:
    """The first and the last record in the response to a waiting run."""
    return record({"command": command})


def output_record(stream: OutputStream, text: str) -> bytes:
    """Return a record of output. This is the server's hottest code, so the JSON is built by hand."""
    if text.isascii():
        return _PREFIX[stream] + _TEXT.encode(text) + b"}\n"
    return _PREFIX[stream] + encode_basestring_ascii(text).encode("ascii") + b"}\n"


def error_record(code: str, message: str) -> bytes:
    """Return the record of an error after the response has begun; it is the last one."""
    return record({"stream": "error", "data": {"code": code, "message": message}})


class OutputText:
    """The text of both streams of one process. Invalid bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoders: dict[OutputStream, IncrementalDecoder] = {}

    def feed(self, stream: OutputStream, data: bytes) -> str:
        """Return the text that is complete now; an incomplete character waits for its other bytes."""
        decoder = self._decoders.get(stream)
        if decoder is None:
            decoder = self._decoders[stream] = _UTF8("replace")
        return decoder.decode(data)

    def finish(self) -> Iterator[tuple[OutputStream, str]]:
        """Return the rest after the end of the process: characters that were never completed."""
        for stream, decoder in self._decoders.items():
            text = decoder.decode(b"", True)
            if text:
                yield stream, text
