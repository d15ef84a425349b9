"""Entry point of ``sandkeep``: a table of commands, each imported only when it is the one asked for.

A command is a function of the arguments after its name that returns an exit status. Typed errors end here, as
one line on standard error with the hint below it; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, NamedTuple

import sandkeep
from sandkeep.errors import InvalidRequest, SandkeepError


class Command(NamedTuple):
    module: str
    function: str
    summary: str


COMMANDS: Final = {
    "run": Command("sandkeep.cli.run", "run_command", "run a command in a sandbox"),
    "serve": Command("sandkeep.cli.serve", "serve_command", "serve the API, in the foreground"),
    "token": Command("sandkeep.cli.token", "token_command", "make, list and revoke tokens for clients"),
    "doctor": Command("sandkeep.cli.doctor", "doctor_command", "say what this machine can and cannot do"),
    "version": Command("sandkeep.cli.main", "version_command", "print the version"),
}


def usage() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: sandkeep COMMAND [ARGUMENT...]",
            "",
            "Named Linux sandboxes that keep their files between runs.",
            "",
            *lines,
            "",
            "'sandkeep COMMAND --help' explains one command.",
        ]
    )


def version_command(args: list[str]) -> int:
    if args:
        raise InvalidRequest("version takes no arguments", field="arguments")
    print(f"sandkeep {sandkeep.__version__}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    name = "version" if args[0] in ("-V", "--version") else args[0]
    command = COMMANDS.get(name)
    if command is None:
        print(f"sandkeep: no command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        function = getattr(import_module(command.module), command.function)
        status: int = function(args[1:])
        sys.stdout.flush()
        return status
    except SandkeepError as error:
        print(f"sandkeep: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away. Point stdout elsewhere so that the interpreter's own flush stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
