"""Messages of a tunnel to a port: binary frames are the connection's bytes, text frames are JSON.

The server's first message says whether it is connected. Either side says that it will send no more bytes; the
server closes when both have.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

from sandkeep.errors import SandkeepError, from_json
from sandkeep.wire.base import encode

ROUTE: Final = "/v1/sessions/{session}/ports/{port}"
MAX_FRAME: Final = 65_536
_PATH: Final = re.compile(r"(?:/api)?/v1/sessions/([^/]+)/ports/(\d{1,5})/?")


class TunnelEnd(NamedTuple):
    """What a tunnel leads to."""

    session: str
    port: int


def target(path: str) -> TunnelEnd | None:
    """Return what a path leads to, if it is that of a tunnel."""
    found = _PATH.fullmatch(path)
    return None if found is None else TunnelEnd(found[1], int(found[2]))


class Open(msgspec.Struct, tag_field="type", tag="open", frozen=True):
    """The program inside has accepted the connection."""


class EndOfBytes(msgspec.Struct, tag_field="type", tag="end", frozen=True):
    """The sender will send no more bytes."""


class Failure(msgspec.Struct, tag_field="type", tag="error", kw_only=True, frozen=True):
    """The server cannot connect."""

    code: str
    message: str

    def error(self) -> SandkeepError:
        return from_json({"code": self.code, "message": self.message})


OPEN: Final = encode(Open()).decode()
END: Final = encode(EndOfBytes()).decode()


def failure(error: SandkeepError) -> str:
    return encode(Failure(code=error.code, message=error.message)).decode()


def read_message(text: str) -> Open | EndOfBytes | Failure:
    """Decode a text frame. Raises ``msgspec.MsgspecError``."""
    return msgspec.json.decode(text, type=Open | EndOfBytes | Failure)
