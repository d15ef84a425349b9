"""What every part of the engine shares: store, host, settings, clock, locks."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Final, TypeVar

from sandkeep.engine.names import new_id
from sandkeep.engine.network import Network
from sandkeep.engine.secrets import Secrets
from sandkeep.engine.settings import Settings
from sandkeep.errors import NotFound
from sandkeep.host.driver import Driver, SessionRef
from sandkeep.host.storage import Storage
from sandkeep.store import Store
from sandkeep.store.rows import Sandbox, Session

T = TypeVar("T")

_FINISH_SECONDS = 10.0

ACTOR: Final[ContextVar[str | None]] = ContextVar("actor", default=None)
"""On whose behalf the current task works."""


class Context:
    def __init__(
        self,
        store: Store,
        driver: Driver,
        storage: Storage,
        settings: Settings,
        log: Callable[..., None],
        *,
        data_dir: str,
    ) -> None:
        self.data_dir = data_dir
        self.store = store
        self.driver = driver
        self.storage = storage
        self.settings = settings
        self.log = log
        self._locks: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.network = Network(self)
        self.secrets = Secrets(self)
        self._finishing: set[asyncio.Task[Any]] = set()

    @staticmethod
    def now_ms() -> int:
        return time.time_ns() // 1_000_000

    @asynccontextmanager
    async def lock(self, project: str, name: str) -> AsyncIterator[None]:
        """The one lock of a sandbox: whoever changes which session it has, or its snapshots, holds it.

        Kept only while somebody uses it. Never take a second one while holding one.
        """
        key = (project, name)
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[key]
            if users == 1:
                del self._locks[key]
            else:
                self._locks[key] = (lock, users - 1)

    def locked(self, project: str, name: str) -> bool:
        """Whether somebody is at work on a sandbox."""
        return (project, name) in self._locks

    def ref(self, session: Session) -> SessionRef:
        return SessionRef(session.host, session.id, session.generation)

    def observed_directory(self, process: str) -> str:
        """Where the output is kept of a process that runs elsewhere."""
        return f"{self.data_dir}/observed/{process}"

    async def remove_observed(self, processes: Iterable[str]) -> None:
        for process in processes:
            await asyncio.to_thread(shutil.rmtree, self.observed_directory(process), ignore_errors=True)

    async def remove_session(self, session: str) -> None:
        """Delete everything an ended session left on its host."""
        await self.remove_observed(self.store.processes.observed_everywhere(session))
        ref = SessionRef(self.driver.host, session)
        try:
            await self.driver.forget(ref)
        except NotFound:
            return
        await self.storage.call("session.remove", session=session)

    def event(self, kind: str, session: Session | None, **data: Any) -> None:
        """Record something that happened to a session."""
        if session is not None:
            box = (session.sandbox, session.sandbox_name)
            self.record(kind, session.project, sandbox=box, session=session.id, **data)

    def record(
        self,
        kind: str,
        project: str,
        *,
        sandbox: tuple[str | None, str | None] = (None, None),
        session: str | None = None,
        **data: Any,
    ) -> None:
        """Record something that happened in a project, for people and for audit.

        Args:
            sandbox: id and name.
            data: never the values of secrets, environments or files.
        """
        now = self.now_ms()
        self.store.events.add(
            new_id("evt", now_ms=now),
            kind,
            time_ms=now,
            project=project,
            sandbox=sandbox[0],
            sandbox_name=sandbox[1],
            session=session,
            data=data,
            actor=ACTOR.get(),
        )

    def forget(self, sandbox: Sandbox) -> None:
        """Delete a sandbox's row; its events stay."""
        with self.store.transaction():
            self.store.sandboxes.delete(sandbox.project, sandbox.name)
            self.record("sandbox.destroyed", sandbox.project, sandbox=(sandbox.id, sandbox.name))

    def spawn(self, work: Coroutine[Any, Any, T], name: str, *, finish: bool = False) -> asyncio.Task[T]:
        """Run something beside requests; a failure is logged, never lost.

        ``close`` waits a little for what is to ``finish``, and cuts off the rest. It is nobody's doing any
        more: a session that ends in an hour does not end on behalf of whoever started it.
        """
        alone = copy_context()
        alone.run(ACTOR.set, None)
        task = asyncio.create_task(work, name=name, context=alone)
        (self._finishing if finish else self._tasks).add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._finishing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log("task failed", task=task.get_name(), error=repr(error))

    async def close(self) -> None:
        if self._finishing:
            await asyncio.wait(self._finishing, timeout=_FINISH_SECONDS)
        tasks = [*self._tasks, *self._finishing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
