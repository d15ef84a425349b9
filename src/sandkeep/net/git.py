"""Running git for a source: it reads packs of unknown origin, so it is confined and limited.

A program of its own. It reads a JSON object from its input:

* ``commands``: arguments of git, one list per command; it stops at the first that fails;
* ``scratch``: the directory to write to, seen by git as ``/scratch``;
* ``git``: where git is; ``data``: the data directory, which git does not see;
* ``bytes``: the size no file may exceed;
* ``confined``: ``false`` for ssh, which needs the keys and the name of the user who runs the server.

It ends with the status of the last command, or with ``UNCONFINED`` and the reason on its error output.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, Final, NoReturn

from sandkeep.errors import SandkeepError
from sandkeep.linux import syscalls
from sandkeep.net import confine

UNCONFINED: Final = 125
MOST_MEMORY: Final = 2 << 30
"""Bytes per process. Git indexes the largest public repositories with less."""
_MOST_PROCESSES: Final = 256
_MOST_OPEN_FILES: Final = 1024
_CPU_SECONDS: Final = 1200


def main() -> NoReturn:
    # The server may die at any time, and only the server can use the result.
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0o022)
    request: dict[str, Any] = json.load(sys.stdin)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    uid: int | None = None
    try:
        if request["confined"]:
            if os.geteuid() == 0:
                uid, _ = confine.take_id()
            confine.enter_namespaces()
    except (OSError, SandkeepError) as error:
        _refuse(error)
    child = os.fork()
    if child == 0:
        _work(request, uid)
    os._exit(_status(os.waitpid(child, 0)[1]))


def _refuse(error: BaseException) -> NoReturn:
    os.write(2, str(error).encode())
    os._exit(UNCONFINED)


def _work(request: dict[str, Any], uid: int | None) -> NoReturn:
    """The first process of the namespace: when it ends, the kernel ends all others."""
    try:
        if request["confined"]:
            also = _beside_the_system(request["git"])
            confine.keep_programs(uid, request["scratch"], also=also, hidden=request["data"])
        # Again, and not before: a change of the user id takes it away.
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, SandkeepError) as error:
        _refuse(error)
    status = 0
    for command in request["commands"]:
        status = _run([request["git"], *command], request)
        if status:
            break
    os._exit(status)


def _beside_the_system(program: str) -> list[str]:
    """Return the directory above ``bin`` of a program that is not installed in a system directory."""
    prefix = os.path.dirname(os.path.dirname(program))
    ours = prefix == "/" or any(f"{program}/".startswith(f"{above}/") for above in confine.SYSTEM)
    return [] if ours else [prefix]


def _run(argv: list[str], request: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        try:
            _limit(request)
            os.execv(argv[0], argv)
        except OSError as error:
            _refuse(OSError(error.errno, error.strerror, argv[0]))
    while True:
        # This reaps processes that git has left behind, too.
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return _status(status)


def _limit(request: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_FSIZE: request["bytes"],
        resource.RLIMIT_DATA: MOST_MEMORY,
        resource.RLIMIT_NOFILE: _MOST_OPEN_FILES,
        resource.RLIMIT_CPU: _CPU_SECONDS,
        resource.RLIMIT_CORE: 0,
    }
    if request["confined"]:
        # Counted within the namespace, or for an id that no other process has.
        limits[resource.RLIMIT_NPROC] = _MOST_PROCESSES
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))
    # The interpreter ignores these two. Git must die when a file grows too large, not handle the error.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code
