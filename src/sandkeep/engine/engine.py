"""`Engine`: every noun over one store and one host. What the server holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sandkeep.engine.context import Context
from sandkeep.engine.drives import Drives
from sandkeep.engine.files import Files
from sandkeep.engine.names import new_id
from sandkeep.engine.processes import Processes
from sandkeep.engine.sandboxes import Sandboxes
from sandkeep.engine.sessions import Sessions
from sandkeep.engine.settings import Settings
from sandkeep.engine.snapshots import Snapshots
from sandkeep.engine.upkeep import Upkeep
from sandkeep.host.layers.btrfs import create_data_directory
from sandkeep.host.native.driver import NativeDriver
from sandkeep.host.storage import Storage
from sandkeep.store import Store
from sandkeep.store.rows import Project, SessionStatus


def _silent(message: str, **facts: Any) -> None:
    del message, facts


class Engine:
    def __init__(self, context: Context) -> None:
        self._context = context
        self.store = context.store
        self.settings = context.settings
        self.driver = context.driver
        self.storage = context.storage
        self.record = context.record
        self.network = context.network
        self.secrets = context.secrets
        self.sessions = Sessions(context)
        self.snapshots = Snapshots(context)
        self.processes = Processes(context, self.sessions)
        self.files = Files(context, self.sessions)
        self.sandboxes = Sandboxes(context, self.sessions, self.snapshots)
        self.drives = Drives(context)
        self.upkeep = Upkeep(context, self.sessions, self.snapshots)

    @classmethod
    async def open(
        cls, data_dir: str, *, settings: Settings | None = None, log: Callable[..., None] = _silent
    ) -> Engine:
        """Open a data directory, find its sessions again, and start looking after them."""
        create_data_directory(data_dir)
        settings = settings or Settings()
        driver = NativeDriver(data_dir, pool=settings.pool)
        store = Store.open(os.path.join(data_dir, "store.db"), now_ms=Context.now_ms())
        try:
            await driver.start()
            storage = Storage(driver)
            context = Context(store, driver, storage, settings, log, data_dir=data_dir)
            engine = cls(context)
            await engine._reconcile()
            context.spawn(engine.network.run(), "network")
            context.spawn(engine.upkeep.run(), "upkeep")
        except BaseException:
            store.close()
            await driver.close()
            raise
        return engine

    async def close(self) -> None:
        """Let go. Sessions go on; whoever opens the directory next finds them."""
        await self._context.close()
        await self.network.close()
        await self.storage.close()
        await self.driver.close()
        self.store.close()

    def project(self, *, team: str, name: str) -> Project:
        """The project that a team calls ``name``, made when first used."""
        found = self.store.projects.find(team=team, name=name)
        if found is not None:
            return found
        now = self._context.now_ms()
        return self.store.projects.ensure(new_id("prj", now_ms=now), team=team, name=name, now_ms=now)

    async def _reconcile(self) -> None:
        await self.storage.call("layer.recover")
        await self.sessions.reconcile()
        for session in self.store.sessions.active_on_host(self.driver.host):
            if session.status is SessionStatus.RUNNING:
                await self.processes.reconcile(session)
        await self._release_unknown_holders()
        await self._remove_strays()

    async def _release_unknown_holders(self) -> None:
        """References of snapshots and drives that a crash kept from being written down."""
        answer = await self.storage.call("layer.holders")
        known = self.store.holders()
        for layer, holders in answer["layers"].items():
            for holder in holders:
                if holder not in known:
                    await self.storage.call("layer.release", layer=layer, holder=holder)
        await self.storage.call("layer.collect")

    async def _remove_strays(self) -> None:
        """Session directories nobody has a record of: a create that a crash cut off, a destroyed sandbox."""
        for ref in await self.driver.sessions():
            session = self.store.sessions.find(ref.session)
            if session is None or (session.sandbox is None and session.status in _ENDED):
                if (await self.driver.state(ref))["status"] == "running":
                    await self.driver.stop(ref, reason="no record of this session")
                await self._context.remove_session(ref.session)
        observed = os.path.join(self._context.data_dir, "observed")
        names = os.listdir(observed) if os.path.isdir(observed) else []
        await self._context.remove_observed([name for name in names if self._is_stray(name)])

    def _is_stray(self, process: str) -> bool:
        found = self.store.processes.find(process)
        session = None if found is None else self.store.sessions.find(found.session)
        return session is None or session.sandbox is None


_ENDED = (SessionStatus.STOPPED, SessionStatus.FAILED, SessionStatus.ABORTED)
