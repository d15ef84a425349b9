"""A real engine on a real data directory, driven from plain test functions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from sandkeep.engine.engine import Engine, Host
from sandkeep.engine.sandboxes import Started
from sandkeep.engine.settings import Settings
from sandkeep.errors import NotFound
from sandkeep.process_options import ProcessOptions
from sandkeep.shared.outputlog import Chunk
from sandkeep.spec import SandboxSpec
from sandkeep.store.rows import ACTIVE, Session
from tests.polling import ENOUGH

T = TypeVar("T")


class EngineLab:
    def __init__(self, data_dir: str, settings: Settings | None = None, host: Host | None = None) -> None:
        self.host = host
        self.data_dir = data_dir
        self.settings = settings or Settings()
        self.log: list[tuple[str, dict[str, Any]]] = []
        self._runner = asyncio.Runner()
        self.engine: Engine = self.do(self._open())
        self.project = self.engine.project(team="team_test", name="prj_test").id

    async def _open(self) -> Engine:
        return await Engine.open(self.data_dir, settings=self.settings, log=self._note, host=self.host)

    def _note(self, message: str, **facts: Any) -> None:
        self.log.append((message, facts))

    def __enter__(self) -> EngineLab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def do(self, work: Awaitable[T]) -> T:
        async def wrap() -> T:
            return await work

        return self._runner.run(wrap())

    def all(self, *work: Awaitable[Any]) -> list[Any]:
        """Everything at once; failures come back as values."""

        async def gather() -> list[Any]:
            return list(await asyncio.gather(*work, return_exceptions=True))

        return self._runner.run(gather())

    def reopen(self) -> None:
        """Restart the engine, as a server that was stopped and started."""
        self.do(self.engine.close())
        self.engine = self.do(self._open())

    def close(self) -> None:
        """Destroy what is left and go."""
        self.remove_all()
        self.do(asyncio.sleep(0))
        self.do(self.engine.close())
        self._runner.close()

    def remove_all(self) -> None:
        """Destroy the sandboxes of the project."""
        for _ in range(1000):
            page = self.engine.store.sandboxes.page(self.project)
            if not page.items:
                break
            for sandbox in page.items:
                try:
                    self.do(
                        self.engine.sandboxes.destroy(
                            self.project, sandbox.name, delete_orphan_snapshots=True
                        )
                    )
                except NotFound:
                    continue

    # --- shorthands --------------------------------------------------------------------------------------

    def create(self, name: str, **spec: Any) -> Started:
        return self.do(self.engine.sandboxes.create(self.project, SandboxSpec(name=name, **spec)))

    def sh(self, session: str, script: str, **options: Any) -> str:
        """Run a script, fail on a bad exit, return what it printed."""
        return self.do(run_script(self.engine, self.project, session, script, **options))

    def text(self, session: str, process: str) -> bytes:
        """Everything a process printed."""

        async def collect() -> bytes:
            items = self.engine.processes.output(self.project, session, process)
            return b"".join([item.data async for item in items if isinstance(item, Chunk)])

        return self.do(collect())

    def ended(self, session: str, *, seconds: float = ENOUGH) -> Session:
        """The session once it has come to its end by itself."""
        deadline = time.monotonic() + seconds
        while (found := self.engine.sessions.get(self.project, session)).status in ACTIVE:
            assert time.monotonic() < deadline, f"{session} is still {found.status}"
            self.do(asyncio.sleep(0.02))
        return found


async def run_script(engine: Engine, project: str, session: str, script: str, **options: Any) -> str:
    process = await engine.processes.start(
        project, session, ProcessOptions(command="bash", args=["-c", script], **options)
    )
    output = b""
    async for item in engine.processes.output(project, session, process.id):
        if isinstance(item, Chunk):
            output += item.data
    ended = await engine.processes.wait(project, session, process.id)
    assert ended.exit_code == 0, (ended, output)
    return output.decode()
