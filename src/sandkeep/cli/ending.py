"""How a command ends: with an exit status, and with one line for whoever has to know why.

========  ====================================================================================
status    meaning
========  ====================================================================================
0         done
1         it could not be done
2         the command line is wrong
125       ``run``, ``exec``, ``sh`` and ``connect``: sandkeep failed, not the command
126, 127  the same four: the command cannot be run, or is not there
130       interrupted
141       whoever read the output has stopped reading
other     the same four: the exit status of the command itself, 128 + n after signal n
========  ====================================================================================
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

import click

from sandkeep.cli.main import load
from sandkeep.cli.output import clean, painted, shows_colour
from sandkeep.errors import (
    DriveAttached,
    ExecutableNotFound,
    ExecutableRefused,
    InvalidRequest,
    NameTaken,
    NotFound,
    SandkeepError,
    ServerUnreachable,
    SnapshotGone,
    Unauthenticated,
)

FAILED, USAGE, OURS, NOT_EXECUTABLE, NO_SUCH_COMMAND = 1, 2, 125, 126, 127
INTERRUPTED, READER_GONE = 130, 141

RUNNING: Final = frozenset({"run", "exec", "sh", "connect"})
"""Commands whose exit status is that of what they run."""

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
    """A command is over, with this exit status; everything was said already.

    Not an ``Exception``: a signal may raise it in the middle of anything, also where those are caught.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class ReaderGone(Exception):
    """Nobody reads our output any more. Not an ``OSError``: click would answer that in its own way."""


_interrupts: list[int] = []
"""What came: somebody may make an error of their own of the exception that was raised."""


def _interrupt(number: int, frame: object) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


def guarded(name: str, args: list[str]) -> int:
    """Run a command and turn whatever it raises into an exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    debug = "SANDKEEP_DEBUG" in os.environ or "--debug" in _before_dashes(args)
    try:
        try:
            load(name).main(args, prog_name=f"sandkeep {name}", standalone_mode=False)
        except click.Abort:
            raise KeyboardInterrupt from None
        except Exception:
            if _interrupts:
                raise KeyboardInterrupt from None
            raise
        sys.stdout.flush()
        return 0
    except Ended as end:
        return end.status
    except click.UsageError as error:
        return _misused(name, error)
    except click.ClickException as error:
        say(error.format_message())
        return FAILED
    except SandkeepError as error:
        if debug:
            raise
        say(error.message, hint_for(error, name))
        return status_of(error, running=name in RUNNING)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (BrokenPipeError, ReaderGone):
        # The reader went away. Point stdout elsewhere so that the interpreter's own flush stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except OSError as error:
        if debug:
            raise
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        say(f"{where}{error.strerror or error}")
        return OURS if name in RUNNING else FAILED
    except Exception as error:
        if debug:
            raise
        say(f"{type(error).__name__}: {error}", "this is a bug; the same with --debug shows where")
        return OURS if name in RUNNING else FAILED


def status_of(error: SandkeepError, *, running: bool) -> int:
    """The exit status an error stands for."""
    if isinstance(error, InvalidRequest):
        return USAGE
    if not running:
        return FAILED
    if isinstance(error, ExecutableNotFound):
        return NO_SUCH_COMMAND
    return NOT_EXECUTABLE if isinstance(error, ExecutableRefused) else OURS


def say(message: str, hint: str | None = None) -> None:
    """One line about what went wrong and, below it, what to do about it."""
    sys.stdout.flush()
    mark = painted("sandkeep:", "red", colour=shows_colour(sys.stderr))
    print(f"{mark} {clean(' '.join(message.split()))}", file=sys.stderr)
    if hint:
        print(f"  {clean(hint)}", file=sys.stderr)


def hint_for(error: SandkeepError, command: str = "") -> str | None:
    """What to run next: what the error says itself, unless that is meant for programs.

    ``command``: what was run, if what it missed could be got and it be run again.
    """
    if isinstance(error, NotFound) and error.details.get("image"):
        fetch = f"'sandkeep images pull {error.details['image']}' fetches it, " if command else ""
        return f"{fetch}'sandkeep images ls' shows what there is"
    if isinstance(error, SnapshotGone | DriveAttached):
        return _command_for(error, command)
    return error.hint or _command_for(error, command)


def _command_for(error: SandkeepError, command: str) -> str | None:
    if isinstance(error, SnapshotGone):
        return "'sandkeep snapshots ls' shows which are left, 'sandkeep rollback' goes back to one"
    if isinstance(error, NotFound):
        kind, missing = error.details.get("kind"), error.details.get("name")
        if kind == "drive" and command not in ("", "drives"):
            return f"'sandkeep drives get-or-create {missing}' makes it, 'sandkeep drives ls' shows others"
        listed = _LISTED_BY.get(str(kind), "")
        listed = listed.replace("NAME", str(error.details.get("sandbox", "NAME")))
        return f"'{listed}' shows what there is" if listed else None
    if isinstance(error, NameTaken):
        taken = error.details.get("name", "NAME")
        return f"'sandkeep connect {taken}' opens a shell in it, 'sandkeep rm {taken}' removes it"
    if isinstance(error, DriveAttached):
        holder = error.details.get("sandbox")
        if holder:
            return f"'sandkeep stop {holder}' lets go of it; 'DRIVE:PATH:snapshot' mounts it as it is"
        return "stop the sandbox that has it: 'sandkeep drives ls' says which"
    if isinstance(error, Unauthenticated):
        return "give a token with --token or SANDKEEP_TOKEN; 'sandkeep token create' makes one"
    if isinstance(error, ServerUnreachable):
        return "'sandkeep status' shows which server is meant"
    return None


def _misused(name: str, error: click.UsageError) -> int:
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        hint = f"did you mean {' or '.join(sorted(error.possibilities))}?"
    else:
        path = error.ctx.command_path if error.ctx is not None else f"sandkeep {name}"
        hint = f"'{path} --help' explains it"
    say(_in_our_words(error).rstrip("."), hint)
    return USAGE


def _in_our_words(error: click.UsageError) -> str:
    if isinstance(error, click.NoSuchOption):
        return f"no option {error.option_name}"
    if isinstance(error, click.BadOptionUsage):
        wants = error.message.endswith("requires an argument.")
        return f"{error.option_name} {'needs a' if wants else 'takes no'} value"
    if error.message.startswith("Got unexpected extra argument"):
        return f"unexpected: {error.message.partition('(')[2].removesuffix(')')}"
    if isinstance(error, click.BadParameter) and error.param is not None and error.ctx is not None:
        name = error.param.get_error_hint(error.ctx).replace("'", "")
        missing = isinstance(error, click.MissingParameter)
        return f"{name} is missing" if missing else f"{name}: {error.message}"
    return error.format_message()


def _before_dashes(args: list[str]) -> list[str]:
    return args[: args.index("--")] if "--" in args else args
