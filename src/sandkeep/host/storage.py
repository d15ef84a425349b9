"""Images and layers for callers on an event loop: a thin client of the worker process."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, Protocol

from sandkeep.errors import SandkeepError, TransportError, from_json
from sandkeep.host.control import read_frame
from sandkeep.host.rootfs import Rootfs
from sandkeep.supervisor import protocol

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it, of how much."""


class Spawner(Protocol):
    """Whoever can run a program where sandboxes' files are accessible."""

    data_dir: str
    mode: Any

    async def start(self) -> None: ...
    def spawn(self, argv: list[str], fd: int, environment: dict[str, str]) -> None: ...


class Storage:
    """One worker process, started when first needed and again should it have died."""

    def __init__(self, spawner: Spawner) -> None:
        self._spawner = spawner
        self._writer: asyncio.StreamWriter | None = None
        self._pump: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._waiting: dict[int, tuple[asyncio.Future[dict[str, Any]], Progress | None]] = {}
        self._next = 0

    async def close(self) -> None:
        """Let the worker go; it finishes what it has begun."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        self._drop(TransportError("closed"))

    async def call(self, op: str, *, progress: Progress | None = None, **arguments: Any) -> dict[str, Any]:
        async with self._connecting:
            if self._writer is None:
                await self._start()
            assert self._writer is not None
            self._next += 1
            number = self._next
            future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            self._waiting[number] = (future, progress)
            self._writer.write(protocol.encode({"id": number, "op": op, "arguments": arguments}))
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    async def rootfs(
        self, image: str, *, layer: str | None = None, progress: Progress | None = None
    ) -> tuple[Rootfs, list[str]]:
        """A root filesystem ready to be mounted, and warnings its user should see."""
        answer = await self.call("rootfs", image=image, layer=layer, progress=progress)
        return Rootfs.from_json(answer["rootfs"]), answer["warnings"]

    async def _start(self) -> None:
        await self._spawner.start()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        script = os.path.join(os.path.dirname(__file__), "start_worker.py")
        argv = [sys.executable, "-I", script, self._spawner.data_dir, self._spawner.mode]
        with theirs:
            self._spawner.spawn(argv, theirs.fileno(), dict(os.environ))
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
        self._pump = asyncio.create_task(self._read(reader), name="storage")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                body, _ = await read_frame(reader)
                future, progress = self._waiting.get(body["id"], (None, None)) if body else (None, None)
                if body is None or future is None or future.done():
                    continue
                if "progress" in body:
                    if progress is not None:
                        progress(*body["progress"])
                elif "error" in body:
                    future.set_exception(from_json(body["error"]))
                else:
                    future.set_result(body["ok"])
        except (asyncio.IncompleteReadError, OSError, protocol.ProtocolError):
            self._drop(TransportError("the worker process ended", hint="the request can be repeated"))

    def _drop(self, error: SandkeepError) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(error)
