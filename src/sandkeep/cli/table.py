"""The table of commands: where each one is, what it is called, and one line about it.

The table alone is enough for ``sandkeep --help`` and for hints about mistyped names. It imports neither click
nor the SDK, so that help stays fast.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Entry(NamedTuple):
    """One command. ``function`` is a click command in ``sandkeep.cli.commands.<module>``."""

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
    "run": Entry("run", "run", "run a command in a new or a named sandbox", SANDBOXES),
    "sh": Entry("create", "sh", "open a shell in a new or a named sandbox", SANDBOXES),
    "create": Entry("create", "create", "create a sandbox and start it", SANDBOXES),
    "fork": Entry("create", "fork", "create a sandbox from the files of another", SANDBOXES),
    "ls": Entry("sandboxes", "ls", "list sandboxes", SANDBOXES),
    "stop": Entry("sandboxes", "stop", "stop sandboxes and keep their files", SANDBOXES),
    "rm": Entry("sandboxes", "rm", "remove sandboxes for good", SANDBOXES),
    "prune": Entry("prune", "prune", "remove what has been stopped for long", SANDBOXES),
    "config": Entry("config", "config", "show and change the configuration of a sandbox", SANDBOXES),
    "exec": Entry("execute", "exec_", "run a command in an existing sandbox", PROCESSES),
    "connect": Entry("execute", "connect", "open a shell in an existing sandbox", PROCESSES),
    "attach": Entry("execute", "attach_", "attach to a command on a terminal of a sandbox", PROCESSES),
    "ps": Entry("processes", "ps", "list the processes of a sandbox", PROCESSES),
    "logs": Entry("processes", "logs", "show the output of a process", PROCESSES),
    "kill": Entry("processes", "kill", "send a signal to a process", PROCESSES),
    "cp": Entry("files", "cp", "copy files and directories to and from a sandbox", PROCESSES),
    "sync": Entry("sync", "sync", "copy only what differs between two directories", PROCESSES),
    "cat": Entry("files", "cat", "print a file of a sandbox, or a part of it", PROCESSES),
    "snapshot": Entry("snapshots", "snapshot", "take a snapshot of a sandbox and stop it", SNAPSHOTS),
    "checkpoint": Entry(
        "snapshots", "checkpoint", "take a snapshot of a sandbox and let it run on", SNAPSHOTS
    ),
    "rollback": Entry("snapshots", "rollback", "go back to an earlier snapshot", SNAPSHOTS),
    "snapshots": Entry("snapshots", "snapshots", "list, inspect and delete snapshots", SNAPSHOTS),
    "sessions": Entry("sessions", "sessions", "list the sessions of a sandbox", SNAPSHOTS),
    "events": Entry("events", "events", "show events and who caused them", SNAPSHOTS),
    "drives": Entry("drives", "drives", "manage drives, which sandboxes can mount", STORAGE),
    "images": Entry("images", "images", "manage the images that sandboxes start from", STORAGE),
    "net": Entry("network", "net", "show the network activity of a sandbox", NETWORK),
    "port-forward": Entry(
        "forward", "port_forward", "make ports of a sandbox ports of this machine", NETWORK
    ),
    "secret": Entry("secrets", "secret", "manage values for network rules and commands", NETWORK),
    "serve": Entry("serve", "serve", "run the server in the foreground", SERVER),
    "token": Entry("tokens", "token", "create, list and revoke tokens for clients", SERVER),
    "status": Entry("status", "status", "show which server is used and whether it runs", SERVER),
    "server": Entry("server", "server", "stop the server in the background", SERVER),
    "repair": Entry("repair", "repair", "find damage and repair it where possible", SERVER),
    "doctor": Entry("doctor", "doctor", "check what this machine can and cannot do", SERVER),
    "uninstall": Entry("uninstall", "uninstall", "remove all sandkeep data from this machine", SERVER),
    "completion": Entry("completion", "completion", "print a completion script for a shell", REST),
    "version": Entry("version", "version", "print the version", REST),
}

ALIASES: Final = {"list": "ls", "remove": "rm", "copy": "cp", "ssh": "connect"}

_NOT_NEEDED: Final = {
    "login": "there is nothing to log in to; for a server over TCP give --token or SANDKEEP_TOKEN",
    "logout": "there is nothing to log out of; a token is given with --token or SANDKEEP_TOKEN",
    "telemetry": "nothing is collected",
    "rename": "a sandbox keeps its name; 'sandkeep fork NAME --name OTHER' creates another with its files",
    "restart": "'sandkeep stop NAME' ends the session, and the next command in NAME starts another",
}
"""Commands of other tools that sandkeep does not need, and why."""

_ELSEWHERE: Final = {
    "top": "sandkeep ps NAME",
    "inspect": "sandkeep config list NAME",
    "info": "sandkeep config list NAME",
    "start": "sandkeep connect NAME",
    "attach": "sandkeep logs -f NAME",
    "port": "sandkeep config list NAME",
    "pull": "sandkeep images pull IMAGE",
    "volume": "sandkeep drives",
    "shutdown": "sandkeep server stop",
    "history": "sandkeep events NAME",
}
"""Commands of other tools, and the sandkeep command that does the same."""
_DESTRUCTIVE: Final = frozenset({"rm", "remove", "stop", "kill", "rollback", "repair", "prune", "uninstall"})
_SIMILARITY: Final = 0.66
"""How similar a word must be to a command to be taken for a typing error."""


def usage() -> str:
    """Return the text of ``sandkeep --help``."""
    width = max(len(name) for name in COMMANDS)
    lines = ["Usage: sandkeep COMMAND [OPTIONS] [ARGUMENTS]", ""]
    lines += ["Named Linux sandboxes that keep their files between runs."]
    section = ""
    for name, entry in COMMANDS.items():
        if entry.section != section:
            section = entry.section
            lines += ["", f"{section}:"]
        lines.append(f"  {name:<{width}}  {entry.summary}")
    lines += [
        "",
        "Examples:",
        "  sandkeep run -- python3 -c 'print(1 + 1)'    in a sandbox that is removed afterwards",
        "  sandkeep run --name web -- touch here        in a sandbox that keeps its files",
        "  sandkeep connect web                         open a shell in it",
        "",
        "'sandkeep COMMAND --help' explains one command.",
    ]
    return "\n".join(lines)


def hint_for_unknown(name: str) -> str:
    """Return what to do instead of a command that does not exist."""
    from difflib import get_close_matches

    if name in _NOT_NEEDED:
        return _NOT_NEEDED[name]
    if name in _ELSEWHERE:
        return f"that is '{_ELSEWHERE[name]}' here"
    # Never suggest a command that ends or deletes something: people often run a suggestion unread.
    harmless = [command for command in (*COMMANDS, *ALIASES) if command not in _DESTRUCTIVE]
    close = get_close_matches(name, harmless, n=1, cutoff=_SIMILARITY)
    return f"did you mean 'sandkeep {close[0]}'?" if close else "'sandkeep --help' lists the commands"
