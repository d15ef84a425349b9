"""`Context`: shared by every part of the engine. Store, host, settings, clock, locks, background tasks."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar, copy_context
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from sandkeep.engine.activity import Activity
from sandkeep.engine.damage import DamagedLayers
from sandkeep.engine.lifecycle import Cause, next_state
from sandkeep.engine.names import new_id
from sandkeep.engine.network import Network
from sandkeep.engine.policies import Policies
from sandkeep.engine.reserve import Reserve
from sandkeep.engine.secrets import Secrets
from sandkeep.engine.settings import Settings
from sandkeep.errors import NoSpace, NotFound, StoreError
from sandkeep.host.driver import Driver, SessionRef
from sandkeep.host.images.registry import Progress
from sandkeep.host.storage import Storage
from sandkeep.shared import clock
from sandkeep.store import Store
from sandkeep.store.rows import Removal, Sandbox, Session

T = TypeVar("T")

_FINISH_SECONDS = 10.0
_GENERATIONS: Final = 4

ACTOR: Final[ContextVar[str | None]] = ContextVar("actor", default=None)
"""The caller for whom the current task works, recorded in events."""


class _HasContext(Protocol):
    _context: Context


_Self = TypeVar("_Self", bound=_HasContext)
_P = ParamSpec("_P")


def with_room(
    method: Callable[Concatenate[_Self, _P], Awaitable[T]],
) -> Callable[Concatenate[_Self, _P], Coroutine[Any, Any, T]]:
    """Let a method that ends or deletes something, and can be repeated, use the reserve on a full disk."""

    @wraps(method)
    async def run(owner: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> T:
        context = owner._context
        context.ending += 1
        given = False
        try:
            given = await context.make_room()
            while True:
                try:
                    return await method(owner, *args, **kwargs)
                except NoSpace:
                    if not await context.make_room(needed=True):
                        raise
                    given = True
        finally:
            context.ending -= 1
            if given:
                await context.keep_room()

    return run


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
        self.activity = Activity(data_dir)
        self.policies = Policies(self)
        self.secrets = Secrets(self, lambda project, name: self.network.refresh_secret(project, name))
        self.network = Network(self, self.policies, self.secrets)
        self.damage = DamagedLayers(self)
        self._finishing: set[asyncio.Task[Any]] = set()
        self._reserve = Reserve(data_dir)
        self._reserve_lock = asyncio.Lock()
        self.ending = 0
        """Number of running methods that end or delete something: they may need the reserve."""
        self.collecting = asyncio.Lock()
        self.collect_asked = False
        """For `garbage.collect_soon`: whether a collection is scheduled that has not begun."""
        self.remove_soon: Callable[[Sandbox], None] = lambda _: None
        """Removes a condemned sandbox as soon as its lock is free; `Sandboxes` sets it."""
        self._cautious = clock.CautiousClock()
        self._preparing: dict[object, str] = {}

    @property
    def preparing(self) -> str | None:
        """What the server prepares now while starts of sandboxes wait: the image of this machine."""
        return next(iter(self._preparing.values()), None)

    @contextmanager
    def preparation(self) -> Iterator[Progress]:
        """Report in ``preparing`` what the block has to build first; yield the callback for its progress."""
        began = clock.steady_ms()
        mine = object()

        def noticed(what: str, done: int, total: int) -> None:
            del total
            if mine not in self._preparing and not done:
                self._preparing[mine] = what
                self.log(f"making the {what}", why="there is none for this machine as it is now")

        try:
            yield noticed
        finally:
            if (what := self._preparing.pop(mine, None)) is not None:
                self.log(f"made the {what}, or gave up", after_ms=clock.steady_ms() - began)

    @staticmethod
    def now_ms() -> int:
        return clock.wall_ms()

    def expiry_ms(self) -> int:
        """Return the time used for expiry; a clock that was just set forward does not count yet."""
        before = self._cautious.ahead_ms
        now = self._cautious.now_ms()
        if self._cautious.ahead_ms and not before:
            ahead = self._cautious.ahead_ms
            self.log("the clock was set forward; expiry waits an hour", level="warning", ahead_ms=ahead)
        return now

    @asynccontextmanager
    async def lock(self, project: str, name: str) -> AsyncIterator[None]:
        """Hold the one lock of a sandbox, as every change of its session or its snapshots does.

        A lock exists only while it is held or waited for. Never take a second one while holding one.
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
        """Return whether a task holds the lock of a sandbox or waits for it."""
        return (project, name) in self._locks

    async def make_room(self, *, needed: bool = False) -> bool:
        """Free part of the reserve on a full disk, before something is ended or deleted.

        Returns whether any was left. ``needed``: the disk is full although it reports free space.
        """
        if not needed and not self._reserve.scarce():
            return False
        async with self._reserve_lock:
            given = await asyncio.to_thread(self._reserve.spend)
        if given:
            self.log("the disk is full", level="warning", path=self.data_dir, reserve_given_up=True)
        return given

    async def keep_room(self) -> None:
        """Refill the reserve that `make_room` freed, once the last method that needs it has returned."""
        async with self._reserve_lock:
            if not self.ending:
                await asyncio.to_thread(self._reserve.fill)

    def ref(self, session: Session) -> SessionRef:
        return SessionRef(session.host, session.id, session.generation)

    def observed_directory(self, process: str) -> str:
        """Return the directory for the output of an observed process, which runs elsewhere."""
        return f"{self.data_dir}/observed/{process}"

    async def remove_observed(self, processes: Iterable[str]) -> None:
        for process in processes:
            await asyncio.to_thread(shutil.rmtree, self.observed_directory(process), ignore_errors=True)

    async def remove_session(self, session: str) -> None:
        """Delete everything that an ended session left on its host."""
        await self.remove_observed(self.store.processes.observed_everywhere(session))
        ref = SessionRef(self.driver.host, session)
        try:
            await self.driver.forget(ref)
        except NotFound:
            return
        await self.storage.remove_session(session)

    async def sync_store(self) -> None:
        """Return once every row written so far survives loss of power."""
        await asyncio.to_thread(self.store.sync)

    async def before_deleting(self) -> None:
        """Sync the rows that say what is not needed: older rows would refer to deleted files."""
        try:
            await self.sync_store()
        except StoreError as error:
            # The disk may be full, and deleting frees space.
            self.log("the store could not be synced", error=str(error))

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
        actor: str | None = None,
        **data: Any,
    ) -> None:
        """Record something that happened in a project, for people and for audit.

        Args:
            sandbox: id and name.
            actor: the caller on whose behalf it was done; by default the one of the current task.
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
            actor=actor or ACTOR.get(),
        )

    def condemn(
        self, sandbox: Sandbox, *, delete_orphan_snapshots: bool = False, reason: str | None = None
    ) -> Sandbox:
        """Record that a sandbox is to be destroyed, before any step of that.

        From here on callers do not find it. ``Sandboxes`` does the rest, now or after a crash.
        """
        removal = Removal(delete_orphan_snapshots, ACTOR.get(), reason)
        return self.store.sandboxes.condemn(sandbox.project, sandbox.name, removal, now_ms=self.now_ms())

    def sandbox_of(self, session: Session) -> Sandbox | None:
        """Return the sandbox of a session; ``None`` if it is destroyed."""
        if session.sandbox is None:
            return None
        return self.store.sandboxes.find_by_id(session.project, session.sandbox)

    def move(self, session: Session, cause: Cause, **changes: object) -> Session:
        """Move a session to the state that ``cause`` leads to; ``changes`` are other columns of its row."""
        return self.store.sessions.move(
            session.project,
            session.id,
            next_state(session.status, cause),
            expected={session.status},
            now_ms=self.now_ms(),
            **changes,  # type: ignore[arg-type]
        )

    def spawn(self, work: Coroutine[Any, Any, T], name: str, *, finish: bool = False) -> asyncio.Task[T]:
        """Run a coroutine in the background; log its failure.

        ``close`` waits a little for tasks that are to ``finish`` and cancels the others. The task has no
        actor: a session that ends in an hour does not end on behalf of the caller who started it.
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

    async def cleared_away(self) -> None:
        """Wait for the clean-up that runs after sandboxes were destroyed and sessions ended.

        Clean-up can start more of it: the removal of a sandbox starts a collection of layers. That is waited
        for too, but not for ever on a server where something always ends.
        """
        for _ in range(_GENERATIONS):
            if not self._finishing:
                return
            await asyncio.wait(set(self._finishing))

    async def alone(self, what: str, work: Awaitable[Any]) -> None:
        """Run one of several independent steps; log its failure, so that the others run too."""
        try:
            await work
        except Exception as error:
            self.log("a step of the start failed", step=what, error=repr(error))

    async def close(self) -> None:
        if self._finishing:
            await asyncio.wait(self._finishing, timeout=_FINISH_SECONDS)
        tasks = [*self._tasks, *self._finishing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
