"""`ZygoteClient`: starts the zygote when it is needed or has died, and asks it for sessions.

Neither the channel of `sandkeep.host.channel` nor its frames fit here. Each request carries a socket, on
which the forked supervisor sends the response, with descriptors: one message of a packet socket is one
request or one response, so nothing has to be numbered.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any, Final

from sandkeep.errors import TransportError, from_json
from sandkeep.host.native import scope
from sandkeep.host.native.mode import Mode, map_ids
from sandkeep.linux import cgroup, openfiles, sockets
from sandkeep.linux.overlay import Way

_START_SECONDS: Final = 30.0
_SCRIPT: Final = os.path.join(os.path.dirname(__file__), "start_zygote.py")

LAST_BREATH_SECONDS: Final = 0.02
"""A dying process closes its descriptors one by one; wait this long before concluding that it died."""


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


class ZygoteClient:
    def __init__(self, data_dir: str, mode: Mode, pool: int, way: Way | None = None) -> None:
        self._data_dir = data_dir
        self._mode = mode
        self._pool = pool
        self._way = way
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._starting = asyncio.Lock()
        self.limits: dict[str, str] = {}
        """Per limit: empty if control groups can enforce it, otherwise the reason."""
        self.scope = scope.SystemdScope()
        """The scope that systemd made for the sessions, or why it made none."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the zygote, or do nothing if it runs."""
        async with self._starting:
            if not self._listens():
                await asyncio.get_running_loop().run_in_executor(None, self._launch)

    async def close(self) -> None:
        """End the zygote. Sessions keep running."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    async def ask(self, session: str, *, network: bool = False) -> tuple[bytes, list[int]]:
        """Start a session; return the supervisor's report, or ``b""`` if it died.

        If the zygote dies during the request, a new zygote is started and asked again.
        """
        asked = self._socket
        answer = await self._ask(session, network)
        if not answer[0]:
            await asyncio.sleep(LAST_BREATH_SECONDS)
            if self._socket is not asked or not self._listens():
                await self.start()
                answer = await self._ask(session, network)
        return answer

    def spawn(self, argv: list[str], fd: int, environment: dict[str, str]) -> None:
        assert self._socket is not None
        sockets.send(self._socket, json.dumps({"spawn": argv, "env": environment}).encode(), [fd])

    def _listens(self) -> bool:
        # Check the socket, not the exit status: a killed process can take a moment until it has one.
        try:
            return self._socket is not None and bool(
                self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            )
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _launch(self) -> None:
        self._close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-I", "-S", "-E", _SCRIPT]
            arguments = [str(number), self._data_dir, self._mode, str(self._pool)]
            self._process = subprocess.Popen(
                [*command, *arguments, *([self._way] if self._way else [])],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(number,),
            )
        openfiles.as_given(self._process.pid)
        ours.settimeout(_START_SECONDS)
        try:
            # The zygote waits for this: which limits it can use depends on its control group.
            self.scope = scope.enter(self._process.pid, cgroup.group_name(self._data_dir))
            with suppress(OSError):  # it has ended, which is noticed below
                ours.send(json.dumps({"scope": self.scope.unit}).encode())
            message = _receive(ours)
            if "map" in message:
                map_ids(self._process.pid)
                with suppress(OSError):
                    ours.send(b"mapped")
                message = _receive(ours)
            if "error" in message:
                raise from_json(message["error"])
        except BaseException:
            self._close()
            raise
        ours.settimeout(None)
        self.limits = {
            name: "" if item["usable"] else item["why"] for name, item in message["limits"].items()
        }

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.wait()
            self._process = None

    async def _ask(self, session: str, network: bool) -> tuple[bytes, list[int]]:
        request = json.dumps({"session": session, "network": network}).encode()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.setblocking(False)
            with theirs:
                assert self._socket is not None
                try:
                    sockets.send(self._socket, request, [theirs.fileno()])
                except (BrokenPipeError, ConnectionResetError):
                    return b"", []
            await _readable(ours)
            try:
                return sockets.receive(ours)
            except ConnectionResetError:
                return b"", []


def _receive(sock: socket.socket) -> dict[str, Any]:
    try:
        data = sock.recv(1 << 16)
    except (TimeoutError, ConnectionResetError):  # a reset: it ended before it read the request
        data = b""
    if not data:
        raise TransportError("the zygote ended while starting", hint="run 'sandkeep doctor'")
    message: dict[str, Any] = json.loads(data)
    return message
