"""`Engine`: every noun over one store and one host. The server holds one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from sandkeep.engine import fetching
from sandkeep.engine.adoption import Adopted, Adoption
from sandkeep.engine.batches import Batches
from sandkeep.engine.context import Context
from sandkeep.engine.drives import Drives
from sandkeep.engine.files import Files
from sandkeep.engine.garbage import Garbage
from sandkeep.engine.images import Images
from sandkeep.engine.names import new_id
from sandkeep.engine.processes import Processes
from sandkeep.engine.repairs import Repairs
from sandkeep.engine.sandboxes import Sandboxes
from sandkeep.engine.sessions import Sessions
from sandkeep.engine.settings import Settings
from sandkeep.engine.snapshots import Snapshots
from sandkeep.engine.tunnels import Tunnels
from sandkeep.engine.upkeep import Upkeep
from sandkeep.errors import NotFound, SandkeepError
from sandkeep.host.driver import Driver
from sandkeep.host.layers.btrfs import create_data_directory
from sandkeep.host.native.driver import NativeDriver
from sandkeep.host.storage import Storage
from sandkeep.linux import btrfs
from sandkeep.store.identity import establish, open_store
from sandkeep.store.rows import Project, SessionStatus


def _silent(message: str, **facts: Any) -> None:
    del message, facts


def _copies_on_write(directory: str) -> bool:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return btrfs.is_btrfs(fd)
    finally:
        os.close(fd)


class Host(NamedTuple):
    """The driver that runs sessions, and the storage of their files."""

    driver: Driver
    storage: Storage


def _native_host(data_dir: str, settings: Settings) -> Host:
    driver = NativeDriver(data_dir, pool=settings.pool)
    return Host(driver, Storage(driver))


class Engine:
    def __init__(self, context: Context) -> None:
        self._context = context
        self.store = context.store
        self.settings = context.settings
        self.driver = context.driver
        self.storage = context.storage
        self.record = context.record
        self.network = context.network
        self.activity = context.activity
        self.secrets = context.secrets
        self.sessions = Sessions(context)
        self.snapshots = Snapshots(context)
        self.processes = Processes(context, self.sessions)
        self.files = Files(context, self.sessions)
        self.sandboxes = Sandboxes(context, self.sessions, self.snapshots)
        self.batches = Batches(context, self.sandboxes)
        self.tunnels = Tunnels(context, self.sessions)
        self.drives = Drives(context)
        self.images = Images(context)
        self.repairs = Repairs(context, self.snapshots)
        self.garbage = Garbage(context)
        self.damage = context.damage
        self.upkeep = Upkeep(context, self.sessions, self.snapshots, self.sandboxes, self.batches)
        self.adopted: list[Adopted] = []
        """What was recovered when the data directory was opened with ``adopt``."""

    @classmethod
    async def open(
        cls,
        data_dir: str,
        *,
        settings: Settings | None = None,
        log: Callable[..., None] = _silent,
        adopt: bool = False,
        host: Host | None = None,
    ) -> Engine:
        """Open a data directory, reconnect to its sessions, and start upkeep.

        With ``adopt``, also open one whose store does not know its layers and sessions: they become
        sandboxes. ``host`` runs the sessions and keeps their files, by default the native driver.

        Raises:
            StoreMismatch: the store does not know the layers and sessions that are there.
        """
        create_data_directory(data_dir)
        settings = settings or Settings()
        driver, storage = host or _native_host(data_dir, settings)
        # On a full copy-on-write disk, a write to a mapped file of the store can kill this process.
        alone = _copies_on_write(data_dir)
        store = open_store(data_dir, now_ms=Context.now_ms(), adopt=adopt, alone=alone)
        try:
            try:
                establish(store, data_dir)
            except (OSError, SandkeepError) as error:  # a full disk must not stop callers from freeing space
                log("the store's identity could not be written", error=str(error))
            await driver.start()
            for warning in driver.warnings():
                log(warning.what, level="warning", why=warning.why, hint=warning.hint)
            context = Context(store, driver, storage, settings, log, data_dir=data_dir)
            engine = cls(context)
            context.policies.seal_plain()
            if adopt:
                engine.adopted = await Adoption(context, engine.sandboxes).run()
            await engine._reconcile()
            context.spawn(engine.network.run(), "network")
            context.spawn(engine.upkeep.run(), "upkeep")
        except BaseException:
            store.close()
            await driver.close()
            raise
        return engine

    async def close(self) -> None:
        """Close the engine. Sessions keep running, and the next engine of the data directory finds them."""
        await self._context.close()
        await self._context.alone("keep idle times", self.upkeep.keep_activity())
        await self._context.alone("keep the store", self.upkeep.keep_store())
        await self.network.close()
        await self.storage.close()
        await self.driver.close()
        self.store.close()

    @property
    def preparing(self) -> str | None:
        """What the server prepares now while starts of sandboxes wait."""
        return self._context.preparing

    async def problems(self) -> list[str]:
        """Return why no sandbox can be created now, for the operator; empty when one can."""
        found = [self.network.problem] if self.network.problem is not None else []
        image = self.settings.default_image
        if image != "host":
            try:
                await self.storage.get_image(image)
            except NotFound:
                found.append(f"default_image: there is no image named {image}")
        return found

    def project(self, *, team: str, name: str) -> Project:
        """Return the project that a team calls ``name``; create it on first use."""
        found = self.store.projects.find(team=team, name=name)
        if found is not None:
            return found
        now = self._context.now_ms()
        return self.store.projects.ensure(new_id("prj", now_ms=now), team=team, name=name, now_ms=now)

    async def _reconcile(self) -> None:
        """Match the files on disk with the rows of the store. Anything damaged is left for `repair`."""
        await self._context.alone("recover", self.storage.recover_layers())
        await self._context.alone("restore records", self.damage.restore_records())
        await self.sessions.reconcile()
        await self.batches.finish()
        await self.sandboxes.finish_removals()
        for session in self.store.sessions.active_on_host(self.driver.host):
            if session.status is SessionStatus.RUNNING:
                await self._context.alone(session.id, self.processes.reconcile(session))
        await self._context.alone("release holders", self.garbage.release_holders())
        await self._context.alone("remove sessions", self.garbage.remove_sessions())
        await self._context.alone("remove output", self.garbage.remove_observed())
        await self._context.alone("sweep sources", asyncio.to_thread(fetching.sweep, self._context.data_dir))
        await self._context.alone("sweep images", self.storage.sweep_images())
        await self._context.alone("look for damage", self.damage.find_damage())
