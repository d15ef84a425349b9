"""Messages of an interactive session: text frames are JSON, binary frames are the terminal's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, field

from sandkeep.checks import check_metadata, refuse
from sandkeep.errors import SandkeepError, from_json
from sandkeep.spec import check_secrets
from sandkeep.wire.base import MAX_SAFE, Body, Count, decode, encode

if TYPE_CHECKING:
    from sandkeep.process_options import ProcessOptions

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes if the program does not exist or cannot be run, as in a shell."""
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
    """``NAME=value``, passed on unchanged."""
    unset: list[str] = field(default_factory=list)
    """Variables of the sandbox to remove; official clients omit it."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Names of secrets, by the variable that gets the value; official clients omit it."""
    cwd: str | None = None
    cols: Size = DEFAULT_COLUMNS
    rows: Size = DEFAULT_ROWS
    timeout: Annotated[int, Meta(ge=1, le=MAX_SAFE)] | None = None
    """Milliseconds after which the program and all its descendants are killed."""
    reads_errors: bool = False
    """Whether the client reads the ``kind`` of an exit, as ours does; for others the error is printed."""
    reads_attached: bool = False
    """Whether the client reads an ``attached`` message; official clients do not expect one."""
    detachable: bool = False
    """The program goes on when the connection ends; otherwise it is hung up."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Keys and values that the record of the process keeps."""

    def __post_init__(self) -> None:
        if not self.command:
            refuse("command", "must not be empty")
        texts = {"command": [self.command], "args": self.args, "env": self.env, "unset": self.unset}
        for name, values in texts.items():
            if any("\0" in value for value in values):
                refuse(name, "must not contain a NUL character")
        check_metadata(self.metadata)
        check_secrets(self.secrets, self.environment())

    def environment(self) -> dict[str, str | None]:
        """Return the variables by name, removed ones as ``None``; entries without ``=`` are ignored."""
        pairs = (entry.partition("=") for entry in self.env)
        found: dict[str, str | None] = {name: value for name, separator, value in pairs if name and separator}
        return found | dict.fromkeys(self.unset)

    def options(self, user: str | None) -> ProcessOptions:
        """Return what to run, as an account of the sandbox."""
        from sandkeep.process_options import ProcessOptions  # which clients do without

        return ProcessOptions(
            command=self.command,
            args=self.args,
            cwd=self.cwd,
            env=self.environment(),
            secrets=self.secrets,
            user=user,
            pty=(self.rows, self.cols),
            kill_after_ms=self.timeout,
            metadata=self.metadata,
        )


class Attach(Body, tag_field="type", tag="attach", kw_only=True, frozen=True):
    """The first message of a client of ours that attaches to a terminal."""

    process: str
    cols: Size | None = None
    rows: Size | None = None
    """The terminal gets this size if both are given."""
    scrollback: Count | None = None
    """Most bytes of earlier output to send; all if it is absent."""


class Resize(Body, tag_field="type", tag="resize", kw_only=True, frozen=True):
    cols: Size
    rows: Size


class Attached(msgspec.Struct, tag_field="type", tag="attached", kw_only=True, frozen=True):
    """The first text frame to clients that read it: the process whose output follows."""

    process: str


class Exit(msgspec.Struct, tag_field="type", tag="exit", kw_only=True, frozen=True, omit_defaults=True):
    code: int
    kind: str = ""
    """Error of a program that could not be started. Official clients ignore it."""
    message: str = ""


def read_message(text: str | bytes) -> Start | Attach | Resize:
    """Decode a text frame from the client."""
    data = text.encode() if isinstance(text, str) else text
    found: Start | Attach | Resize = decode(Start | Attach | Resize, data)  # type: ignore[arg-type]
    return found


def attached_message(process: str) -> str:
    return encode(Attached(process=process)).decode()


def exit_message(code: int, error: SandkeepError | None = None) -> str:
    """The last text frame to the client; the socket is closed after it."""
    ended = Exit(code=code) if error is None else Exit(code=code, kind=error.code, message=error.message)
    return encode(ended).decode()


def read_news(text: str) -> Attached | tuple[int, SandkeepError | None]:
    """Return a text frame to the client: its process; or the exit, with the error if nothing was started."""
    ended = msgspec.json.decode(text, type=Attached | Exit)
    if isinstance(ended, Attached):
        return ended
    if not ended.kind:
        return ended.code, None
    return ended.code, from_json({"code": ended.kind, "message": ended.message})
