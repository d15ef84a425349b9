"""How a command ends: with an exit status and, if it failed, one line that says why.

========  ====================================================================================
status    meaning
========  ====================================================================================
0         done
1         it could not be done
2         the command line is wrong
125       ``run``, ``exec``, ``sh`` and ``connect``: sandkeep failed, not the command
126, 127  the same four: the command cannot be executed, or does not exist
130       interrupted
141       the reader of the output has closed the pipe
other     the same four: the exit status of the command itself, 128 + n after signal n
========  ====================================================================================
"""

from __future__ import annotations

import os
import sys
from typing import Final

import click

from sandkeep.cli.app import common_values
from sandkeep.cli.output import clean, painted, shows_colour
from sandkeep.errors import (
    ConfigurationDiffers,
    DriveAttached,
    ExecutableNotFound,
    ExecutableRefused,
    InvalidRequest,
    NameTaken,
    NotFound,
    SandkeepError,
    ServerUnreachable,
    SessionStopped,
    SnapshotGone,
    Unauthenticated,
)

FAILED, USAGE, OURS, NOT_EXECUTABLE, NO_SUCH_COMMAND = 1, 2, 125, 126, 127
INTERRUPTED, READER_GONE = 130, 141

RUNNING: Final = frozenset({"run", "exec", "sh", "connect"})
"""Commands that exit with the status of the command they run."""

_LISTED_BY: Final = {
    "sandbox": "sandkeep ls --all",
    "snapshot": "sandkeep snapshots ls",
    "drive": "sandkeep drives ls",
    "session": "sandkeep sessions ls NAME --all",
    "process": "sandkeep ps NAME --all",
    "image": "sandkeep images ls",
    "secret": "sandkeep secret ls",
    "token": "sandkeep token ls",
}


class Ended(BaseException):
    """Ends a command with an exit status; everything was reported already.

    Not an ``Exception``: a signal handler raises it at any point, also inside code that catches those.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class UsageWithHint(click.UsageError):
    """A wrong command line, with a hint of its own."""

    def __init__(self, message: str, hint: str, ctx: click.Context | None = None) -> None:
        super().__init__(message, ctx)
        self.hint = hint


def conclude(error: BaseException, ctx: click.Context | None) -> int:
    """Report what ended a command line, and return the exit status for it.

    ``ctx`` is the context of ``sandkeep`` itself, if the command line could be parsed that far. With
    ``--debug`` an error is raised again, for its traceback.
    """
    if isinstance(error, Ended):
        return error.status
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # Redirect stdout, so that the interpreter's own flush at exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    if isinstance(error, click.UsageError):
        return _misused(error)
    if isinstance(error, click.ClickException):
        say(error.format_message())
        return FAILED
    debug = "SANDKEEP_DEBUG" in os.environ or (ctx is not None and "debug" in common_values(ctx))
    if debug or not isinstance(error, Exception):
        raise error
    return _failed(error, (ctx and ctx.invoked_subcommand) or "")


def _failed(error: Exception, command: str) -> int:
    if isinstance(error, SandkeepError):
        say(error.message, hint_for(error, command))
        return status_of(error, running=command in RUNNING)
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        say(f"{where}{error.strerror or error}")
    else:
        say(f"{type(error).__name__}: {error}", "this is a bug; run it again with --debug for a traceback")
    return OURS if command in RUNNING else FAILED


def status_of(error: SandkeepError, *, running: bool) -> int:
    """Return the exit status for an error."""
    if isinstance(error, InvalidRequest):
        return USAGE
    if not running:
        return FAILED
    if isinstance(error, ExecutableNotFound):
        return NO_SUCH_COMMAND
    return NOT_EXECUTABLE if isinstance(error, ExecutableRefused) else OURS


def say(message: str, hint: str | None = None) -> None:
    """Print one line about an error and, below it, what to do about it."""
    sys.stdout.flush()
    mark = painted("sandkeep:", "red", colour=shows_colour(sys.stderr))
    print(f"{mark} {clean(' '.join(message.split()))}", file=sys.stderr)
    if hint:
        print(f"  {clean(hint)}", file=sys.stderr)


def hint_for(error: SandkeepError, command: str = "") -> str | None:
    """Return what to run next: the error's own hint, unless that is written for programs.

    ``command`` is the command that was run, if it can be run again once the missing thing exists.
    """
    if isinstance(error, NotFound) and error.details.get("image"):
        fetch = f"'sandkeep images pull {error.details['image']}' pulls it, " if command else ""
        return f"{fetch}'sandkeep images ls' lists the images"
    if isinstance(error, SnapshotGone | DriveAttached | ConfigurationDiffers | SessionStopped):
        return _command_for(error, command)
    return error.hint or _command_for(error, command)


def _command_for(error: SandkeepError, command: str) -> str | None:
    if isinstance(error, SnapshotGone):
        return "'sandkeep snapshots ls' lists those that are left, 'sandkeep rollback' goes back to one"
    if isinstance(error, NotFound):
        kind, missing = error.details.get("kind"), error.details.get("name")
        if kind == "drive" and command not in ("", "drives"):
            return f"'sandkeep drives get-or-create {missing}' creates it, 'sandkeep drives ls' lists others"
        listed = _LISTED_BY.get(str(kind), "")
        listed = listed.replace("NAME", str(error.details.get("sandbox", "NAME")))
        return f"'{listed}' lists what exists" if listed else None
    if isinstance(error, SessionStopped):
        box = error.details.get("sandbox")
        return f"'sandkeep connect {box}' starts it again" if box else error.hint
    if isinstance(error, NameTaken):
        taken = error.details.get("name", "NAME")
        return f"'sandkeep connect {taken}' opens a shell in it; a new one needs another name"
    if isinstance(error, ConfigurationDiffers):
        return "'sandkeep config' changes the sandbox; leave the option out to use it as it is"
    if isinstance(error, DriveAttached):
        holder = error.details.get("sandbox")
        if holder:
            return f"'sandkeep stop {holder}' releases it; 'DRIVE:PATH:snapshot' mounts its last content"
        return "stop the sandbox that uses it: 'sandkeep drives ls' shows which"
    if isinstance(error, Unauthenticated):
        return "give a token with --token or SANDKEEP_TOKEN; 'sandkeep token create' creates one"
    if isinstance(error, ServerUnreachable):
        return "'sandkeep status' shows which server is used"
    return None


def _misused(error: click.UsageError) -> int:
    if isinstance(error, UsageWithHint):
        hint = error.hint
    elif isinstance(error, click.NoSuchOption) and error.possibilities:
        hint = f"did you mean {' or '.join(sorted(error.possibilities))}?"
    elif error.ctx is None or error.ctx.parent is None:
        hint = "'sandkeep --help' lists the commands"
    else:
        hint = f"'{error.ctx.command_path} --help' explains it"
    say(_usage_message(error).rstrip("."), hint)
    return USAGE


def _usage_message(error: click.UsageError) -> str:
    """Word a usage error from its attributes: click's own text can change, or be translated."""
    if isinstance(error, click.NoSuchOption):
        leading = error.ctx is not None and error.ctx.parent is None
        return f"no option {error.option_name}{' before a command' if leading else ''}"
    if isinstance(error, click.BadOptionUsage) and error.ctx is not None:
        return f"{error.option_name} {'takes no' if _is_flag(error) else 'needs a'} value"
    if isinstance(error, click.BadParameter) and error.param is not None and error.ctx is not None:
        name = error.param.get_error_hint(error.ctx).replace("'", "")
        missing = isinstance(error, click.MissingParameter)
        return f"{name} is missing" if missing else f"{name}: {error.message}"
    return error.format_message()


def _is_flag(error: click.BadOptionUsage) -> bool:
    assert error.ctx is not None
    params = error.ctx.command.get_params(error.ctx)
    return any(
        isinstance(param, click.Option) and param.is_flag
        for param in params
        if error.option_name in param.opts
    )
