"""Script of a worker process that counts its steps and kills itself at one of them; see `steps.py`.

A step is a change of the disk: a name that appears, moves or goes, and the answer at the end of an operation.
Names without a meaning that go one after the other are one step. Nothing is counted until there is a file
``armed`` in the directory of ``STEPS``; each step is a line of ``worker-steps``. The file ``worker-plan``
says at which step to die, before it is taken, and whether the server dies with us; that happens once.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

sys.path[:0] = os.environ["STEPS_PATH"].split(":")

from sandkeep.host import worker  # noqa: E402

PLACE = os.environ["STEPS"]
DELETIONS = ("unlink", "remove", "rmdir")
OUR_OWN = ("lock", "state.json", "spec.json", "meta.json", "refs", "fs")
"""Names in directories that are being deleted whose absence means something."""
_exists, _open = os.path.exists, os.open
_lock = threading.Lock()
_last = ""
_count = 0


def step(name: str, *, deletion: bool = False) -> None:
    global _last, _count
    if not _exists(f"{PLACE}/armed"):
        _count, _last = 0, ""
        return
    with _lock:
        if deletion and name == _last:
            return
        _last = name
        _count += 1
        fd = _open(f"{PLACE}/worker-steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(fd, f"{name}\n".encode())
        os.close(fd)
        if not _exists(f"{PLACE}/worker-plan"):
            return
        with open(f"{PLACE}/worker-plan", encoding="ascii") as handle:
            plan = json.load(handle)
        if _count == plan["at"] and not _exists(f"{PLACE}/worker-killed"):
            os.close(_open(f"{PLACE}/worker-killed", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if plan["server"]:
                os.kill(plan["server"], signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def _shown(path: Any) -> str:
    text = os.fsdecode(path) if isinstance(path, str | bytes) else "?"
    return text.removeprefix(f"{sys.argv[1]}/")


def wrap(name: str) -> None:
    real: Callable[..., Any] = getattr(os, name)

    def counted(path: Any, *args: Any, **options: Any) -> Any:
        if name in DELETIONS:
            shown = _shown(path)
            inside = not os.path.isabs(path) and shown not in OUR_OWN
            step("delete inside" if inside else f"delete {shown}", deletion=True)
        elif name == "open":
            if args and args[0] & os.O_CREAT and "lock" not in _shown(path):
                step(f"make {_shown(path)}")
        else:
            step(f"{name} {_shown(path)}")
        return real(path, *args, **options)

    setattr(os, name, counted)


def answering(op: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def done(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        step(f"answer {op}")
        return result

    return done


for function in ("rename", "replace", "mkdir", "open", *DELETIONS):
    wrap(function)
for operation, work in list(worker.OPERATIONS.items()):
    worker.OPERATIONS[operation] = answering(operation, work)
worker.main()
