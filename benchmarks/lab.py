"""Servers to measure: real ones, as an operator starts them, each on an empty data directory."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import IO, Any

import sandkeep
from benchmarks.references import Commands

_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    pid: int
    data: str

    @property
    def url(self) -> str:
        return f"unix://{self.data}/server.sock"

    def client(self) -> sandkeep.Client:
        return sandkeep.Client(url=self.url)


class Lab:
    """Where benchmarks work: a directory, references, and servers that last as long as it does."""

    def __init__(self, directory: str, *, quick: bool) -> None:
        self.directory = directory
        self.quick = quick
        self._held = AsyncExitStack()
        self._commands: Commands | None = None
        self._server: Server | None = None
        self._client: sandkeep.Client | None = None

    async def __aenter__(self) -> Lab:
        await self._held.__aenter__()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self._held.__aexit__(*failure)

    def rounds(self, usual: int, quick: int) -> int:
        return quick if self.quick else usual

    def commands(self) -> Commands:
        if self._commands is None:
            area = tempfile.mkdtemp(prefix="commands-", dir=self.directory)
            self._commands = self._held.enter_context(Commands(area))
        return self._commands

    def scratch(self) -> str:
        return tempfile.mkdtemp(prefix="scratch-", dir=self.directory)

    async def client(self) -> sandkeep.Client:
        """A client of the server with default settings, shared by the benchmarks that change none."""
        if self._client is None:
            self._client = await self._held.enter_async_context((await self.server()).client())
        return self._client

    async def server(self) -> Server:
        if self._server is None:
            self._server = await self._held.enter_async_context(self.serving())
        return self._server

    @asynccontextmanager
    async def serving(self, **settings: Any) -> AsyncIterator[Server]:
        """A server of its own. Its sandboxes are destroyed at the end."""
        data = tempfile.mkdtemp(prefix="data-", dir=self.directory)
        with open(f"{data}/settings.json", "w", encoding="utf-8") as handle:
            json.dump(settings, handle)
        command = [sys.executable, "-m", "sandkeep", "serve", "--data-dir", data, "--port", "0"]
        with open(f"{data}/log", "ab") as log:
            process = _start(command, log)
        server = Server(process.pid, data)
        try:
            await _until_ready(server, process)
            await _warm(server)
            yield server
        finally:
            try:
                async with server.client() as client:
                    await _destroy_all(client)
            finally:
                process.terminate()
                await asyncio.to_thread(process.wait, 60)
                shutil.rmtree(data)


def _start(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


async def _until_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not os.path.exists(f"{server.data}/server.json"):
        if process.poll() is not None or time.monotonic() > deadline:
            with open(f"{server.data}/log", encoding="utf-8", errors="replace") as log:
                raise RuntimeError(f"the server did not start:\n{log.read()}")
        await asyncio.sleep(0.01)


async def _warm(server: Server) -> None:
    """The first sandbox of a data directory builds its image; that must not be timed by accident."""
    async with server.client() as client, client.create_sandbox() as box:
        await box.run_process("true")


async def _destroy_all(client: sandkeep.Client) -> None:
    while names := [info.name async for info in client.query_sandboxes()]:
        await gather([destroy(client, name) for name in names])


async def destroy(client: sandkeep.Client, name: str) -> None:
    await (await client.get_sandbox(name)).destroy()


async def gather(work: list[Any], *, width: int = 8) -> list[Any]:
    """Everything, a few at a time."""
    room = asyncio.Semaphore(width)

    async def one(item: Any) -> Any:
        async with room:
            return await item

    return await asyncio.gather(*(one(item) for item in work))
