"""Messages of an interactive session: text frames are JSON, binary frames are the terminal's bytes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, field

from sandkeep.types import refuse
from sandkeep.wire.base import Body, decode, encode

NOT_FOUND, NOT_EXECUTABLE = 4127, 4126
"""How a connection is closed when the program is not there, or cannot be run."""
MAX_FRAME = 65_536
"""Bytes of one message to a client; some drop the connection at a larger one."""
DEFAULT_COLUMNS = 80
DEFAULT_ROWS = 24

Size = Annotated[int, Meta(ge=1, le=65_535)]


class Start(Body, tag_field="type", tag="start", kw_only=True, frozen=True):
    """The first message."""

    command: str
    args: list[str] = field(default_factory=list)
    env: list[str] = field(default_factory=list)
    """``NAME=value``, passed on as they are."""
    cwd: str | None = None
    cols: Size = DEFAULT_COLUMNS
    rows: Size = DEFAULT_ROWS

    def __post_init__(self) -> None:
        if not self.command:
            refuse("command", "must not be empty")
        for name, values in (("command", [self.command]), ("args", self.args), ("env", self.env)):
            if any("\0" in value for value in values):
                refuse(name, "must not contain a NUL character")

    def environment(self) -> dict[str, str]:
        """The variables by name; an entry without ``=`` is not one."""
        pairs = (entry.partition("=") for entry in self.env)
        return {name: value for name, separator, value in pairs if name and separator}


class Resize(Body, tag_field="type", tag="resize", kw_only=True, frozen=True):
    cols: Size
    rows: Size


class Exit(msgspec.Struct, tag_field="type", tag="exit", kw_only=True, frozen=True):
    code: int


def read_message(text: str | bytes) -> Start | Resize:
    """A text frame from the client."""
    data = text.encode() if isinstance(text, str) else text
    return decode(Start | Resize, data)  # type: ignore[arg-type]


def exit_message(code: int) -> str:
    """The last text frame to the client; the socket is closed after it."""
    return encode(Exit(code=code)).decode()
