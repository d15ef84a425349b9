"""A program on a machine that is no Linux, as far as that can be had on one: run with a server's URL.

What Windows does not have is taken away before sandkeep is imported: modules, and names of ``os``,
``socket``, ``select`` and ``signal``. Libraries that were written for both are imported before, and the event
loop is this machine's.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import os
import select
import signal
import socket
import ssl  # noqa: F401
import subprocess  # noqa: F401
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import anyio  # noqa: F401
import httpcore2  # noqa: F401
import websockets.sync.client  # noqa: F401

MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty", "uvloop"}
NAMES: list[tuple[ModuleType, str]] = [
    (os, "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_PATH fchmod geteuid getuid pipe2 sendfile splice"),
    (select, "POLLIN POLLOUT poll"),
    (signal, "SIGHUP SIGKILL SIGUSR1"),
    (socket, "AF_UNIX MSG_DONTWAIT SOCK_CLOEXEC SOCK_NONBLOCK"),
]


class Absent(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def take_away() -> None:
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Absent())
    for module, names in NAMES:
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = "win32"


def use(loop: asyncio.AbstractEventLoop, url: str, token: str, team: str, project: str) -> None:
    import sandkeep
    from sandkeep import sync
    from sandkeep.errors import InvalidRequest

    whole: list[Any] = [getattr(module, name) for module in (sandkeep, sync) for name in module.__all__]
    assert whole
    named: dict[str, Any] = {"token": token, "team": team, "project": project}
    for wrong in (None, "unix:///tmp/server.sock"):
        try:
            sync.Client(wrong)
        except InvalidRequest as error:
            assert "url" in str(error)
        else:
            raise AssertionError("there is no local server here")
    with (
        sync.Client(url, **named) as client,
        client.create_sandbox(persistent=False) as box,
        tempfile.TemporaryDirectory() as place,
    ):
        assert box.run_process("echo", ["hello"], capture_output=True).stdout_text == "hello\n"
        box.fs.write_text("a/text", "written")
        box.fs.download("a/text", f"{place}/text")
        box.fs.download("a", f"{place}/tree")
        box.fs.upload(f"{place}/tree", "again")
        assert box.fs.read_text("again/text") == "written"
        sleeper = box.create_process("sleep", ["1000"])
        sleeper.send_signal("USR1")
        assert sleeper.wait() == 128 + 10
        killed = box.create_process("sleep", ["1000"])
        killed.kill()
        assert killed.wait() == 128 + 9

    async def again() -> None:
        async with sandkeep.Client(url, **named) as client, client.create_sandbox(persistent=False) as box:
            done = await box.run_process("cat", input=b"through", capture_output=True)
            assert done.stdout == b"through"
            await box.fs.write_text("text", "written")
            assert await box.fs.read_text("text") == "written"

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(again())


if __name__ == "__main__":
    its_loop = asyncio.new_event_loop()
    take_away()
    use(its_loop, *sys.argv[1:])
    print("done")
