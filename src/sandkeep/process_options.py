"""What to run in a session, and how each layer spells it: for the server, clients do not import it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from sandkeep.dataclass import dataclass

_OPTION: Final = "option"
_SAME: Final = ""


class ProcessOption(NamedTuple):
    """How each layer spells one field of `ProcessOptions`."""

    keyword: str | None
    """The argument of the SDK's ``run_process`` and ``create_process``; ``None``: they do not offer it."""
    body: str | None
    """The field of the request body; ``None``: only terminals have it."""
    host: str
    """The field of the driver's specification."""


def _process_option(
    keyword: str | None = _SAME, *, body: str | None = _SAME, host: str = _SAME
) -> dict[str, ProcessOption]:
    return {_OPTION: ProcessOption(keyword, body, host)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """What to run in a session. Fields and words are those of the engine and the host."""

    command: str = field(metadata=_process_option(host="argv"))
    args: Sequence[str] = field(default=(), metadata=_process_option(host="argv"))
    cwd: str | None = field(default=None, metadata=_process_option())
    env: Mapping[str, str | None] = field(default_factory=dict, repr=False, metadata=_process_option())
    """``None`` removes a variable that the sandbox has."""
    secrets: Mapping[str, str] = field(default_factory=dict, metadata=_process_option(host="env"))
    """Names of secrets of the project, by the variable that gets the value."""
    user: str | None = field(default=None, metadata=_process_option(None))
    """An account of the sandbox; of handles of an account in the SDK."""
    root: bool = field(default=False, metadata=_process_option("sudo", body="sudo"))
    """Run it as root of the sandbox."""
    stdin: bool = field(default=False, metadata=_process_option(body="attach_stdin"))
    """Keep standard input open; otherwise it is empty."""
    stderr: Literal["stdout"] | None = field(default=None, metadata=_process_option())
    """``stdout``: standard error is the same pipe as standard output, so the order of both is kept."""
    pty: tuple[int, int] | None = field(default=None, metadata=_process_option(None, body=None))
    """Rows and columns of a terminal to run on."""
    kill_after_ms: int | None = field(default=None, metadata=_process_option("kill_after", body="timeout"))
    """After so long the process and every descendant of it are killed."""
    grace_ms: int | None = field(default=None, metadata=_process_option("grace", body="grace"))
    """At that time they get SIGTERM, and SIGKILL so much later; otherwise SIGKILL at once."""
    metadata: Mapping[str, str] = field(default_factory=dict, metadata=_process_option())
    """The caller's own keys and values. The server keeps and shows them."""


def _described_process() -> dict[str, ProcessOption]:
    found: dict[str, ProcessOption] = {}
    for each in fields(ProcessOptions):
        option: ProcessOption = each.metadata[_OPTION]
        same = {key: each.name for key, word in option._asdict().items() if word == _SAME}
        found[each.name] = option._replace(**same)
    return found


PROCESS_OPTIONS: Final[Mapping[str, ProcessOption]] = MappingProxyType(_described_process())
"""Every option of a process, by its field of `ProcessOptions`."""
