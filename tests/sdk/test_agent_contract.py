"""The contract of agents' surfaces, kept by the SDK itself over a unix socket and over TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import sandkeep
from sandkeep.errors import NotFound, ProcessTimeout, SessionStopped
from tests.agent_contract import AgentBox, AgentContract, Ran, Surface
from tests.server.server_process import ServerProcess

pytestmark = pytest.mark.anyio


class SdkBox:
    def __init__(self, box: sandkeep.Sandbox) -> None:
        self._box = box

    async def run(self, command: str, args: list[str], *, limit: float | None = None) -> Ran:
        try:
            done = await self._box.run_process(command, args, capture_output=True, timeout=limit)
        except ProcessTimeout as late:
            return Ran(None, late.stdout or b"", late.stderr or b"")
        return Ran(done.returncode, done.stdout or b"", done.stderr or b"")

    async def write(self, path: str, content: bytes) -> None:
        await self._box.fs.write_bytes(path, content)

    async def read(self, path: str) -> bytes:
        return await self._box.fs.read_bytes(path)

    async def destroy(self) -> None:
        await self._box.destroy()


class SdkSurface:
    gone = (NotFound, SessionStopped)

    def __init__(self, url: str, token: str | None) -> None:
        self._url, self._token = url, token

    @asynccontextmanager
    async def box(self) -> AsyncIterator[AgentBox]:
        async with (
            sandkeep.Client(self._url, token=self._token) as client,
            client.create_sandbox() as box,
        ):
            yield SdkBox(box)

    def program(self, tag: str, seconds: int) -> str:
        return (
            "import time; from sandkeep import sync\n"
            f"client = sync.Client({self._url!r}, token={self._token!r})\n"
            f"box = client.create_sandbox(tags={{'contract': {tag!r}}}, delete_after={seconds})\n"
            "box.run_process('true', check=True)\n"
            "print('up', flush=True); time.sleep(600)\n"
        )

    async def names(self, tag: str | None = None) -> list[str]:
        async with sandkeep.Client(self._url, token=self._token) as client:
            found = [info async for info in client.query_sandboxes()]
        return [info.name for info in found if tag is None or info.tags.get("contract") == tag]


class TestSdk(AgentContract):
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture(params=["unix", "tcp"])
    def surface(self, request: pytest.FixtureRequest, server: ServerProcess) -> Surface:
        if request.param == "unix":
            return SdkSurface(f"unix://{server.socket}", None)
        return SdkSurface(server.url, server.token)
