"""``sandkeep ps``, ``logs`` and ``kill``: processes that run, and what is remembered of those that did."""

from __future__ import annotations

import codecs
import shlex
import signal as signals
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli import show
from sandkeep.cli.follow import show as show_output
from sandkeep.cli.framework import App, argument, command, option, sandbox_argument
from sandkeep.cli.output import ago, span
from sandkeep.cli.values import NumberType
from sandkeep.errors import NotFound
from sandkeep.types import ProcessStatus

if TYPE_CHECKING:
    from sandkeep.sync import Process, Sandbox


@command("ps", examples=[("of earlier sessions too", "sandkeep ps web --all")])
@sandbox_argument()
@option("-a", "--all", "everything", is_flag=True, help="Of all sessions, not only the latest.")
@option("--session", metavar="SESSION_ID", help="Of this session.")
def ps(app: App, name: str, everything: bool, session: str | None) -> None:
    """List the processes sandkeep started in a sandbox, newest first; those that ended too."""
    if everything and session:
        raise click.UsageError("--all and --session cannot be given together")
    found = _processes(app.sandbox(name), everything=everything, session=session)
    if app.json:
        app.out.json([show.process(process) for process in found])
    elif found:
        app.out.table(("ID", "STATUS", "EXIT", "STARTED", "RAN", "COMMAND"), [_row(each) for each in found])
    else:
        app.note(f"nothing was run in {name}" if everything else f"nothing was run in this session of {name}")


def _processes(box: Sandbox, *, everything: bool, session: str | None) -> list[Process]:
    if not everything:
        return box.processes(session_id=session)
    return [process for each in box.sessions() for process in box.processes(session_id=each.id)]


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
    help="The process; the one started last when not given.",
)


@command(
    "logs",
    examples=[
        ("of whatever was started last", "sandkeep logs web"),
        ("as it is printed", "sandkeep logs -f web cmd_1234"),
    ],
)
@sandbox_argument()
@_PROCESS
@option("-f", "--follow", is_flag=True, help="Go on until the process ends.")
@option("--since-offset", type=NumberType(0), default=0, metavar="BYTES", help="Skip so many bytes.")
def logs(app: App, name: str, process: str | None, follow: bool, since_offset: int) -> None:
    """Show what a process printed, from its durable log: while it runs, or long after.

    With --json each piece is a line: its offset and end (for --since-offset), time, stream and text.
    """
    found = _process(app.sandbox(name), process)
    if app.json:
        _records(app, found, offset=since_offset, follow=follow)
    else:
        show_output(found, offset=since_offset, live=follow)


def _records(app: App, process: Process, *, offset: int, follow: bool) -> None:
    from sandkeep.sync import OutputGap

    # A character may be torn between two pieces of its stream.
    decoders: dict[str, Any] = {}
    with closing(process.output(offset, follow=follow)) as items:
        for item in items:
            if isinstance(item, OutputGap):
                app.out.record({"offset": item.offset, "end": item.end, "dropped": item.length})
                continue
            stream = item.stream.value
            decoder = decoders.setdefault(stream, codecs.getincrementaldecoder("utf-8")("replace"))
            body = {"offset": item.offset, "end": item.end, "time": item.time, "stream": stream}
            app.out.record({**body, "text": decoder.decode(item.data)})


@command(
    "kill",
    examples=[
        ("ask whatever was started last to end", "sandkeep kill web"),
        ("end it", "sandkeep kill -s KILL web cmd_1234"),
    ],
)
@sandbox_argument()
@_PROCESS
@option("-s", "--signal", default="TERM", show_default=True, metavar="SIGNAL", help="By name or number.")
def kill(app: App, name: str, process: str | None, signal: str) -> None:
    """Send a signal to a process and everything in its group."""
    number = _number(signal)
    box = app.sandbox(name)
    found = _process(box, process, running=process is None)
    found.send_signal(number)
    if app.json:
        app.out.json({"process": found.id, "signal": signal.upper().removeprefix("SIG")})
    else:
        app.out.line(found.id)


def _number(text: str) -> int:
    """A signal, looked at before the process: what cannot be sent to any is a mistake for each."""
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    if name in signals.Signals.__members__:
        return signals.Signals[name]
    if text.isdecimal() and int(text) in signals.valid_signals():
        return int(text)
    raise click.UsageError(f"--signal: {text!r} is no signal")


def _process(box: Sandbox, process: str | None, *, running: bool = False) -> Process:
    if process is not None:
        return box.get_process(process)
    for found in box.processes():
        if not running or found.status is ProcessStatus.RUNNING:
            return found
    what = "no process runs" if running else "nothing was run"
    raise NotFound(
        f"{what} in the latest session of {box.name}",
        kind="process",
        hint=f"'sandkeep ps {box.name} --all' shows those of earlier sessions",
    )
