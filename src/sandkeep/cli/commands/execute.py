"""``sandkeep exec``, ``connect`` and ``attach``: commands and shells in existing sandboxes."""

from __future__ import annotations

import signal
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from sandkeep.cli import options
from sandkeep.cli.app import App
from sandkeep.cli.exit_status import Ended, say
from sandkeep.cli.framework import Argument, Command, argument, command, option, sandbox_argument
from sandkeep.cli.output import span
from sandkeep.cli.values import DURATION
from sandkeep.errors import NotFound, SandkeepError
from sandkeep.states import ProcessStatus

if TYPE_CHECKING:
    from sandkeep.sync import Process, Sandbox, Session

SHELL = ("/bin/sh", "-c", "if command -v bash >/dev/null; then exec bash -l; else exec sh -l; fi")
"""bash if the sandbox has it, otherwise sh."""
_SETTLING_SECONDS: Final = 3.0
_CLOCKS_DIFFER: Final = timedelta(seconds=1)
BARE = {
    "env": (),
    "secrets": (),
    "unset": (),
    "workdir": None,
    "sudo": False,
    "no_extend_timeout": False,
    "interactive": True,
}
"""Options of a shell that was opened without any."""


class WithCommand(Command):
    """Takes another command line as its last argument; options in that are not ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = sum(isinstance(param, Argument) and param.nargs == 1 for param in self.params)
        return super().parse_args(ctx, self._parted(args, own))

    def _parted(self, args: list[str], own: int) -> list[str]:
        """Return our options, then ``--``, our arguments and the command."""
        takes_value = {
            name: not param.is_flag
            for param in [*self.params, self.get_help_option(click.Context(self))]
            if isinstance(param, click.Option)
            for name in param.opts
        }
        ours: list[str] = []
        names: list[str] = []
        rest = list(args)
        while rest:
            item = rest[0]
            if item == "--":
                del rest[0]
                break
            if not item.startswith("-") or item == "-":
                if len(names) == own:
                    break
                names.append(rest.pop(0))
                continue
            ours.append(rest.pop(0))
            if _wants_value(item, takes_value):
                if not rest:
                    return ours  # click reports the missing value
                ours.append(rest.pop(0))
        return [*ours, "--", *names, *rest]


def _wants_value(item: str, takes_value: dict[str, bool]) -> bool:
    """Whether the next word is the value of this option."""
    if item.startswith("--"):
        return "=" not in item and takes_value.get(item, False)
    for index, letter in enumerate(item[1:], 2):
        if takes_value.get(f"-{letter}", False):
            return index == len(item)
    return False


@command(
    "exec",
    json=False,
    cls=WithCommand,
    examples=[
        ("run the tests", "sandkeep exec web -- npm test"),
        ("as root, in another directory", "sandkeep exec --sudo -w /tmp web ls -la"),
        ("a program that needs a terminal", "sandkeep exec -it web htop"),
        ("with a secret as a variable", "sandkeep exec --secret OPENAI_API_KEY=openai web -- agent"),
        ("with a file as its input", "sandkeep exec -i web -- wc -l < notes.txt"),
        ("in the background", "sandkeep exec -d web -- make"),
        ("on a terminal that can be left", "sandkeep exec -it --detachable web htop"),
    ],
)
@sandbox_argument()
@argument("command", nargs=-1, required=True, metavar="[--] COMMAND...", help="Command to run in it.")
@option(
    "-d",
    "--detach",
    is_flag=True,
    section=options.COMMAND,
    help="Print the id of the process and return; 'sandkeep logs' has its output.",
)
@options.how_to_run
@options.metadata
@options.interactive
@option(
    "--timeout",
    type=DURATION,
    section=options.COMMAND,
    help="Kill the command and its descendants after this time.",
)
@option(
    "--grace",
    type=DURATION,
    section=options.COMMAND,
    help="With --timeout: send SIGTERM then, and kill only this much later.",
)
@options.detachable
@options.extend
def exec_(app: App, name: str, command: tuple[str, ...], detach: bool, **values: Any) -> None:
    """Run a command in an existing sandbox; a stopped sandbox is resumed.

    Output is shown as it is printed, and the exit status is that of the command. Ctrl-C interrupts the
    command, a second Ctrl-C kills it. With --detach the command runs on by itself.
    """
    if detach and (values["interactive"] or values["tty"]):
        raise click.UsageError("--detach cannot be given together with --interactive or --tty")
    if values["detachable"] and not values["interactive"]:
        raise click.UsageError("--detachable needs --interactive")
    box = app.sandbox(name, auto_resume=True)
    if detach:
        app.out.line(_start(app, box, command, values).id)
        return
    raise Ended(perform(app, box, command, values))


@command("connect", json=False, examples=[("open a shell", "sandkeep connect web")])
@sandbox_argument()
@options.how_to_run
@option(
    "--timeout",
    type=DURATION,
    section=options.COMMAND,
    help="Kill the shell and its descendants after this time.",
)
@options.detachable
@options.extend
def connect(app: App, name: str, **values: Any) -> None:
    """Open a shell in an existing sandbox; a stopped sandbox is resumed.

    Also called ssh. The session's timeout is kept extended while the shell is open. Leaving the shell leaves
    the sandbox running until its timeout; its files are kept.
    """
    box = app.sandbox(name, auto_resume=True)
    raise Ended(perform(app, box, SHELL, {**values, "interactive": True}))


@command(
    "attach",
    json=False,
    examples=[
        ("to the terminal opened last", "sandkeep attach web"),
        ("to a certain one", "sandkeep attach web cmd_1234"),
    ],
)
@sandbox_argument()
@argument(
    "process",
    metavar="[PROCESS_ID]",
    required=False,
    help="The process on the terminal [default: of those that run, the one started last]",
)
@options.extend
def attach_(app: App, name: str, process: str | None, no_extend_timeout: bool) -> None:
    """Attach to a command that runs on a terminal in a sandbox, after what it printed last.

    Several terminals can be attached at once. Ctrl-P Ctrl-Q detaches and leaves the command running; the exit
    status is 0 then, and otherwise that of the command. When the terminal that started a command goes, the
    command ends, unless it was started with --detachable.
    """
    from sandkeep.cli import attach

    if not attach.possible():
        raise click.UsageError("standard input and standard output must be terminals; see 'sandkeep logs -f'")
    box = app.sandbox(name)
    found = process or _last_terminal(box)
    try:
        status = attach.attach_again(box, found, extend=not no_extend_timeout)
    except attach.Detached:
        status = _detached(app, box, found)
    raise Ended(status)


def _last_terminal(box: Sandbox) -> str:
    for process in box.processes():
        if process.terminal and process.status is ProcessStatus.RUNNING:
            return process.id
    raise NotFound(
        f"no command runs on a terminal in {box.name}",
        kind="process",
        hint=f"'sandkeep exec -it --detachable {box.name} COMMAND' starts one",
    )


def _detached(app: App, box: Sandbox, process_id: str) -> int:
    app.note(f"detached; 'sandkeep attach {box.name} {process_id}' attaches again")
    return 0


def perform(app: App, box: Sandbox, command: tuple[str, ...], values: dict[str, Any]) -> int:
    """Run a command with these options and return its exit status."""
    from sandkeep.cli import attach
    from sandkeep.cli.follow import follow

    wanted: timedelta | None = values.get("timeout")
    _check_grace(values)
    if values.get("detachable") and not attach.possible():
        raise click.UsageError("--detachable: standard input and standard output must be terminals")
    if values.get("interactive") and attach.possible():
        began = time.monotonic()
        try:
            status = attach.attach(
                box,
                command,
                cwd=values["workdir"],
                env=_variables(values),
                secrets=dict(values["secrets"]),
                sudo=values["sudo"],
                kill_after=wanted,
                extend=not values["no_extend_timeout"],
                detachable=bool(values.get("detachable")),
                metadata=dict(values.get("metadata", ())),
            )
        except attach.Detached as left:
            return _detached(app, box, left.process_id)
        if status > 128 and not _explain(box, box.current_session.id, "the terminal was open", line=False):
            _note_limit(app, command[0], wanted, time.monotonic() - began, status)
        return status
    process = _start(app, box, command, values)
    status = follow(process, stdin=bool(values.get("interactive")))
    if process.status is not ProcessStatus.EXITED:
        ended = _explain(box, process.session_id, f"{command[0]} ran")
        if process.explanation and not ended:
            app.note(f"{command[0]}: {process.explanation}")
    return status


def _start(app: App, box: Sandbox, command: tuple[str, ...], values: dict[str, Any]) -> Process:
    """Start a command without a terminal."""
    _check_grace(values)
    with app.starting(f"Starting {command[0]} in {box.name}"):
        return box.create_process(
            command[0],
            command[1:],
            cwd=values["workdir"],
            env=_variables(values),
            secrets=dict(values["secrets"]),
            sudo=values["sudo"],
            stdin=bool(values.get("interactive")),
            kill_after=values.get("timeout"),
            grace=values.get("grace"),
            metadata=dict(values.get("metadata", ())),
        )


def _variables(values: dict[str, Any]) -> dict[str, str | None]:
    return {**dict(values["env"]), **dict.fromkeys(values["unset"])}


def _check_grace(values: dict[str, Any]) -> None:
    if values.get("grace") is not None and values.get("timeout") is None:
        raise click.UsageError("--grace needs --timeout")


def _note_limit(app: App, command: str, limit: timedelta | None, ran: float, status: int) -> None:
    """Say that a command on a terminal was killed by its time limit, if its exit status and run time fit."""
    if limit is not None and status == 128 + signal.SIGKILL and ran >= limit.total_seconds():
        app.note(f"{command}: killed after {span(limit)}")


def _explain(box: Sandbox, session_id: str, meanwhile: str, *, line: bool = True) -> bool:
    """Report if a command was ended by the end of its session; return whether that was so.

    ``line`` says whether the cursor is at the beginning of a line.
    """
    try:
        session = _settled(box, session_id)
    except SandkeepError:
        return False
    if session.id != session_id or session.is_running:
        return False
    if not line:
        click.echo(err=True)
    say(
        f"the session of {box.name} ended while {meanwhile}; its timeout is "
        f"{span(session.execution_time_limit)}",
        f"'sandkeep config timeout {box.name} 1h' gives later sessions more time",
    )
    return True


def _settled(box: Sandbox, session_id: str) -> Session:
    """Return the current session; if its time is up, wait a moment for the server to record its end.

    The supervisor ends the processes first, so that their end can be known before that of the session.
    """
    deadline = time.monotonic() + _SETTLING_SECONDS
    while True:
        session = box.refresh().current_session
        due = box.expires_at is not None and box.expires_at <= datetime.now(UTC) + _CLOCKS_DIFFER
        if session.id != session_id or not session.is_running or not due or time.monotonic() > deadline:
            return session
        time.sleep(0.05)
