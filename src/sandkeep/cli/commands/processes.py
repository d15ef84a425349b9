"""``sandkeep ps``, ``logs`` and ``kill``: running processes, and the records of ended ones."""

from __future__ import annotations

import codecs
import shlex
import signal as signals
from collections.abc import Generator
from contextlib import closing
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli import present
from sandkeep.cli.app import App
from sandkeep.cli.follow import show as show_output
from sandkeep.cli.framework import argument, command, each_once, option, sandbox_argument
from sandkeep.cli.logparts import log_part
from sandkeep.cli.output import ago, span
from sandkeep.cli.values import DURATION, MOMENT, TAG, NumberType
from sandkeep.errors import NotFound
from sandkeep.states import ProcessStatus

if TYPE_CHECKING:
    from sandkeep.sync import OutputChunk, OutputGap, Process, Sandbox


@command("ps", examples=[("also of earlier sessions", "sandkeep ps web --all")])
@sandbox_argument()
@option(
    "-a", "--all", "everything", is_flag=True, help="List processes of all sessions, not only of the latest."
)
@option("--session", metavar="SESSION_ID", help="List processes of this session.")
@option(
    "--metadata",
    multiple=True,
    type=TAG,
    callback=each_once,
    help="List processes with this note in their record. Can be repeated.",
)
def ps(
    app: App, name: str, everything: bool, session: str | None, metadata: tuple[tuple[str, str], ...]
) -> None:
    """List the processes that sandkeep started in a sandbox, newest first, including ended ones."""
    if everything and session:
        raise click.UsageError("--all and --session cannot be given together")
    found = _processes(app.sandbox(name), dict(metadata), everything=everything, session=session)
    if app.json:
        app.out.json([present.process(process) for process in found])
    elif found:
        app.out.table(("ID", "STATUS", "EXIT", "STARTED", "RAN", "COMMAND"), [_row(each) for each in found])
    elif metadata:
        app.note(f"no process of {name} has this metadata")
    else:
        app.note(
            f"no process was started in {name}"
            if everything
            else f"no process was started in this session of {name}"
        )


def _processes(
    box: Sandbox, metadata: dict[str, str], *, everything: bool, session: str | None
) -> list[Process]:
    if not everything:
        return box.processes(session_id=session, metadata=metadata)
    return [
        process for each in box.sessions() for process in box.processes(session_id=each.id, metadata=metadata)
    ]


def _row(process: Process) -> tuple[str, ...]:
    return (
        process.id,
        process.status.value,
        "-" if process.returncode is None else str(process.returncode),
        ago(process.started_at),
        span(process.duration),
        shlex.join([process.command, *process.args]),
    )


_PROCESS = argument(
    "process",
    metavar="[PROCESS_ID]",
    required=False,
    help="The process [default: the one started last]",
)


@command(
    "logs",
    examples=[
        ("of the process started last", "sandkeep logs web"),
        ("as it is printed", "sandkeep logs -f web cmd_1234"),
        ("its last lines, and what follows", "sandkeep logs --tail 20 -f web"),
        ("what it printed in the last ten minutes", "sandkeep logs --since 10m web"),
    ],
)
@sandbox_argument()
@_PROCESS
@option("-f", "--follow", is_flag=True, help="Follow the output until the process ends.")
@option("--since-offset", type=NumberType(0), default=0, metavar="BYTES", help="Skip this many bytes.")
@option("-n", "--tail", type=NumberType(0), metavar="LINES", help="Show only the last lines of the output.")
@option("--since", type=MOMENT, help="Show what was printed since a time, or in the last 30s, 5m or 2h.")
def logs(
    app: App,
    name: str,
    process: str | None,
    follow: bool,
    since_offset: int,
    tail: int | None,
    since: datetime | None,
) -> None:
    """Show the output of a process from its durable log, while it runs or long after.

    Lines of standard output and standard error count in the order they were printed. With --json each chunk
    is a line: its offset and end (for --since-offset), time, stream and text.
    """
    found = _process(app.sandbox(name), process)
    items = log_part(found, offset=since_offset, tail=tail, since=since, follow=follow)
    if app.json:
        _records(app, items)
    else:
        show_output(items)


def _records(app: App, chosen: Generator[OutputChunk | OutputGap]) -> None:
    from sandkeep.sync import OutputGap

    # A character can be split between two chunks of its stream.
    decoders: dict[str, Any] = {}
    with closing(chosen) as items:
        for item in items:
            if isinstance(item, OutputGap):
                app.out.record({"offset": item.offset, "end": item.end, item.reason: item.length})
                continue
            stream = item.stream.value
            decoder = decoders.setdefault(stream, codecs.getincrementaldecoder("utf-8")("replace"))
            body = {"offset": item.offset, "end": item.end, "time": item.time, "stream": stream}
            app.out.record({**body, "text": decoder.decode(item.data)})


@command(
    "kill",
    examples=[
        ("ask the process started last to end", "sandkeep kill web"),
        ("end it", "sandkeep kill -s KILL web cmd_1234"),
    ],
)
@sandbox_argument()
@_PROCESS
@option(
    "-s",
    "--signal",
    default="TERM",
    show_default=True,
    metavar="SIGNAL",
    help="Signal to send, by name or number.",
)
@option(
    "--grace",
    type=DURATION,
    help="With TERM: kill the process and its descendants if they have not ended this much later.",
)
def kill(app: App, name: str, process: str | None, signal: str, grace: timedelta | None) -> None:
    """Send a signal to a process and its group; TERM and KILL go to all its descendants."""
    number = _number(signal)
    if grace is not None and number != signals.SIGTERM:
        raise click.UsageError("--grace is for TERM")
    box = app.sandbox(name)
    found = _process(box, process, running=process is None)
    if grace is None:
        found.send_signal(number)
    else:
        found.terminate(grace=grace)
    if app.json:
        app.out.json({"process": found.id, "signal": signal.upper().removeprefix("SIG")})
    else:
        app.out.line(found.id)


def _number(text: str) -> int:
    """Return the number of a signal; refuse an invalid one before looking for the process."""
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    if name in signals.Signals.__members__:
        return signals.Signals[name]
    if text.isdecimal() and int(text) in signals.valid_signals():
        return int(text)
    raise click.UsageError(f"--signal: {text!r} is not a signal")


def _process(box: Sandbox, process: str | None, *, running: bool = False) -> Process:
    if process is not None:
        return box.get_process(process)
    for found in box.processes():
        if not running or found.status is ProcessStatus.RUNNING:
            return found
    what = "no process runs" if running else "no process was started"
    raise NotFound(
        f"{what} in the latest session of {box.name}",
        kind="process",
        hint=f"'sandkeep ps {box.name} --all' lists those of earlier sessions",
    )
