"""Measure and remove a data directory with the rights of its files' owner.

Files of sandboxes belong to subordinate ids where the user has some, and only a process in a user namespace
with those ids may delete them. `Remover` starts such a process. It needs nothing else: no server, no zygote,
no overlay.

The two processes exchange lines of JSON, one request at a time.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from sandkeep.errors import SandkeepError
from sandkeep.host.layers.tree import remove_tree
from sandkeep.host.native.mode import Mode, choose_mode, map_ids
from sandkeep.linux import syscalls

_SCRIPT: Final = os.path.join(os.path.dirname(__file__), "start_remover.py")
DISKS_OWN: Final = "lost+found"
"""Found in a data directory that is a mounted disk. It belongs to the filesystem, and stays."""


class Remover:
    """The removing process, for one ``with`` block."""

    def __init__(self) -> None:
        self.mode: Mode = choose_mode()
        self.lacks = ""
        """Why the process has no rights over files of subordinate ids, though the user has such ids."""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._launch(self.mode)
        if self.mode == "subuid":
            try:
                answer = self._receive()
                if "error" in answer:
                    raise SandkeepError(answer["error"])
                assert self._process is not None
                map_ids(self._process.pid)
                self._ask({"op": "mapped"})
            except SandkeepError as error:
                # The process still does what the user's own id may do.
                self.lacks = error.message
                self.__exit__(None, None, None)
                self._launch("single")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.stdout.close()
            if kind is not None:
                self._process.kill()
            self._process.wait()
            self._process = None

    def measure(self, directory: str, *, seconds: float) -> tuple[int, bool]:
        """Return the bytes on disk in a directory, and whether there was time to count all of them."""
        answer = self._ask({"op": "measure", "path": directory, "seconds": seconds})
        return answer["bytes"], answer["complete"]

    def remove(self, directory: str, *, last: tuple[str, ...]) -> list[str]:
        """Remove a directory and its content, the entries called ``last`` after all others.

        Return a line for each entry that could not be removed, with the reason.
        """
        failures: list[str] = self._ask({"op": "remove", "path": directory, "last": last})["failures"]
        return failures

    def _launch(self, mode: Mode) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", _SCRIPT, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # reported below
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SandkeepError("the process that removes files ended by itself")
        answer: dict[str, Any] = json.loads(line)
        return answer


# --- in that process -------------------------------------------------------------------------------------


def main(mode: str) -> NoReturn:
    if mode == "subuid":
        _take_ids()
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "measure":
            size, complete = measure(request["path"], seconds=request["seconds"])
            _answer({"bytes": size, "complete": complete})
        elif request["op"] == "remove":
            _answer({"failures": remove(request["path"], last=request["last"])})
    os._exit(0)


def _answer(body: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(body) + "\n")
    sys.stdout.flush()


def _take_ids() -> None:
    try:
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        _answer({"map": True})
        sys.stdin.readline()
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        os.setgroups([])
    except OSError as error:
        _answer({"error": f"user namespaces cannot be used here: {error.strerror}"})
        os._exit(1)
    _answer({"ready": True})


def measure(directory: str, *, seconds: float) -> tuple[int, bool]:
    """Measure a directory. A file with many names counts once; unreadable entries do not count."""
    until = time.monotonic() + seconds
    total = 0
    seen: set[tuple[int, int]] = set()
    waiting = [os.fsencode(directory)]
    while waiting:
        if time.monotonic() > until:
            return total, False
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(entry.path)
                    elif status.st_nlink > 1:
                        if (status.st_dev, status.st_ino) in seen:
                            continue
                        seen.add((status.st_dev, status.st_ino))
                    total += status.st_blocks * 512
        except OSError:
            continue  # removed meanwhile, or not readable
    return total, True


def remove(directory: str, *, last: list[str]) -> list[str]:
    failures: list[str] = []
    try:
        names = [name for name in os.listdir(directory) if name != DISKS_OWN]
    except FileNotFoundError:
        return []
    except OSError as error:
        return [_said(error, directory)]
    order = [*sorted(set(names) - set(last)), *(name for name in last if name in names)]
    for path in [*(os.path.join(directory, name) for name in order), directory]:
        if path == directory and failures:
            break
        try:
            os.rmdir(path) if path == directory else remove_tree(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            failures.append(_said(error, path))
    return failures


def _said(error: OSError, path: str) -> str:
    return f"{path}: {error.strerror or error}"
