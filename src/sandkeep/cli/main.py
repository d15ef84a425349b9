"""Entry point of ``sandkeep``: a table of commands, each imported only when it is the one asked for.

A command is a :mod:`click` command in the module of its noun. The table alone answers ``--help``,
``--version`` and mistyped names, so those need neither click nor the SDK. How commands end, well or not, is
in :mod:`sandkeep.cli.ending`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

import sandkeep

if TYPE_CHECKING:
    import click


class Command(NamedTuple):
    """Where a command is, and one line about it."""

    module: str
    function: str
    summary: str
    section: str


SANDBOXES, PROCESSES, SNAPSHOTS, STORAGE, NETWORK, SERVER, REST = (
    "Sandboxes",
    "Processes and files",
    "Snapshots and history",
    "Images and drives",
    "Network",
    "Server",
    "This program",
)

COMMANDS: Final = {
    "run": Command("run", "run", "run a command in a new or a named sandbox", SANDBOXES),
    "sh": Command("create", "sh", "open a shell in a new or a named sandbox", SANDBOXES),
    "create": Command("create", "create", "create a sandbox and start it", SANDBOXES),
    "fork": Command("create", "fork", "make a new sandbox from the files of another", SANDBOXES),
    "ls": Command("sandboxes", "ls", "list sandboxes", SANDBOXES),
    "stop": Command("sandboxes", "stop", "stop sandboxes and keep their files", SANDBOXES),
    "rm": Command("sandboxes", "rm", "remove sandboxes for good", SANDBOXES),
    "config": Command("config", "config", "show and change how a sandbox is configured", SANDBOXES),
    "exec": Command("execute", "exec_", "run a command in an existing sandbox", PROCESSES),
    "connect": Command("execute", "connect", "open a shell in an existing sandbox", PROCESSES),
    "ps": Command("processes", "ps", "list the processes of a sandbox", PROCESSES),
    "logs": Command("processes", "logs", "show what a process printed", PROCESSES),
    "kill": Command("processes", "kill", "send a signal to a process", PROCESSES),
    "cp": Command("copy", "cp", "copy files and directories to and from a sandbox", PROCESSES),
    "snapshot": Command("snapshots", "snapshot", "keep the files of a sandbox and stop it", SNAPSHOTS),
    "checkpoint": Command("snapshots", "checkpoint", "keep the files of a sandbox that goes on", SNAPSHOTS),
    "rollback": Command("snapshots", "rollback", "go back to an earlier snapshot", SNAPSHOTS),
    "snapshots": Command("snapshots", "snapshots", "list, inspect and delete snapshots", SNAPSHOTS),
    "sessions": Command("sessions", "sessions", "list the sessions of a sandbox", SNAPSHOTS),
    "events": Command("events", "events", "show what happened, and who had it done", SNAPSHOTS),
    "drives": Command("drives", "drives", "manage drives, which sandboxes can share", STORAGE),
    "images": Command("images", "images", "manage the images sandboxes start from", STORAGE),
    "net": Command("network", "net", "show what the network of a sandbox did", NETWORK),
    "secret": Command("secrets", "secret", "manage values that network rules inject", NETWORK),
    "serve": Command("serve", "serve", "serve the API in the foreground", SERVER),
    "token": Command("token", "token", "make, list and revoke tokens for clients", SERVER),
    "status": Command("status", "status", "show which server is used and whether it runs", SERVER),
    "doctor": Command("doctor", "doctor", "say what this machine can and cannot do", SERVER),
    "completion": Command("completion", "completion", "print a completion script for a shell", REST),
    "version": Command("version", "version", "print the version", REST),
}

ALIASES: Final = {"list": "ls", "remove": "rm", "copy": "cp", "ssh": "connect"}

_NOT_NEEDED: Final = {
    "login": "there is nothing to log in to; for a server over TCP give --token or SANDKEEP_TOKEN",
    "logout": "there is nothing to log out of; a token is given with --token or SANDKEEP_TOKEN",
    "telemetry": "nothing is collected",
}
"""Commands people know from elsewhere, and why there are none here."""

LEADING_FLAGS: Final = {"--debug": "SANDKEEP_DEBUG", "--quiet": "SANDKEEP_QUIET", "-q": "SANDKEEP_QUIET"}
LEADING_VALUES: Final = {
    "--url": "SANDKEEP_URL",
    "--token": "SANDKEEP_TOKEN",
    "--team": "SANDKEEP_TEAM",
    "--scope": "SANDKEEP_TEAM",
    "--project": "SANDKEEP_PROJECT",
    "--data-dir": "SANDKEEP_HOME",
}


def usage() -> str:
    """What ``sandkeep --help`` prints."""
    width = max(len(name) for name in COMMANDS)
    lines = ["Usage: sandkeep COMMAND [OPTIONS] [ARGUMENTS]", ""]
    lines += ["Named Linux sandboxes that keep their files between runs."]
    section = ""
    for name, command in COMMANDS.items():
        if command.section != section:
            section = command.section
            lines += ["", f"{section}:"]
        lines.append(f"  {name:<{width}}  {command.summary}")
    lines += [
        "",
        "Examples:",
        "  sandkeep run -- python3 -c 'print(1 + 1)'    in a sandbox that is gone afterwards",
        "  sandkeep run --name web -- touch here        in one that keeps its files",
        "  sandkeep connect web                         look around in it",
        "",
        "'sandkeep COMMAND --help' explains one command.",
    ]
    return "\n".join(lines)


def load(name: str) -> click.Command:
    """The command of that name."""
    command = COMMANDS[name]
    found: click.Command = getattr(import_module(f"sandkeep.cli.{command.module}"), command.function)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    if "_SANDKEEP_COMPLETE" in os.environ:
        from sandkeep.cli.completion import answer

        return answer()
    args = _leading(list(sys.argv[1:] if argv is None else argv))
    if args is None:
        return 2
    if not args or args[0] in ("-h", "--help", "help"):
        if len(args) > 1 and args[0] == "help":
            args = [*args[1:], "--help"]
        else:
            print(usage(), file=sys.stdout if args else sys.stderr)
            return 0 if args else 2
    name = "version" if args[0] in ("-V", "--version") else ALIASES.get(args[0], args[0])
    if name == "version" and len(args) == 1:
        print(f"sandkeep {sandkeep.__version__}")
        return 0
    if name not in COMMANDS:
        return _unknown(name)
    try:
        from sandkeep.cli.ending import guarded

        return guarded(name, args[1:])
    except KeyboardInterrupt:
        return 130


def _leading(args: list[str]) -> list[str] | None:
    """What follows the options in front of the command, which count for whatever command it is."""
    while args and args[0].startswith("-"):
        name, equals, value = args[0].partition("=")
        if not equals and name in LEADING_FLAGS:
            os.environ[LEADING_FLAGS[name]] = "1"
            del args[0]
        elif name in LEADING_VALUES and (equals or len(args) > 1):
            os.environ[LEADING_VALUES[name]] = value if equals else args[1]
            del args[: 1 if equals else 2]
        elif name in ("-h", "--help", "-V", "--version"):
            break
        else:
            lacking = name in LEADING_VALUES
            problem = f"{name} needs a value" if lacking else f"no option {name} before a command"
            print(f"sandkeep: {problem}", file=sys.stderr)
            print("  'sandkeep --help' lists the commands", file=sys.stderr)
            return None
    return args


def _unknown(name: str) -> int:
    from difflib import get_close_matches

    close = get_close_matches(name, [*COMMANDS, *ALIASES], n=1)
    if name in _NOT_NEEDED:
        hint = _NOT_NEEDED[name]
    elif close:
        hint = f"did you mean 'sandkeep {close[0]}'?"
    else:
        hint = "'sandkeep --help' lists the commands"
    print(f"sandkeep: no command {name!r}", file=sys.stderr)
    print(f"  {hint}", file=sys.stderr)
    return 2
