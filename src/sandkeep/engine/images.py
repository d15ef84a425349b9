"""Images: which project owns each, and what each caller may have the server fetch.

A pulled image belongs to the project that pulled it and has a name there. An image that the operator imports,
or pulls as shared, can be used by every project and deleted by the operator only.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Final

from sandkeep.engine.context import ACTOR, Context
from sandkeep.errors import AccessDenied, WrongState
from sandkeep.host.images.allowance import Allowance
from sandkeep.host.images.image import Image
from sandkeep.host.images.reference import parse_reference
from sandkeep.host.images.registry import Progress
from sandkeep.host.images.transport import Access
from sandkeep.reach import Reach

_PULLS: Final = 4
"""Concurrent pulls over all projects: half of the worker's threads."""
_PULLS_OF_PROJECT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An image of a registry, as a caller asked for it."""

    reference: str
    platform: str | None = None
    auth: tuple[str, str] | None = None
    insecure: bool = False
    operator: bool = False
    """The local user of the machine asks, who could also fetch it without the server."""
    shared: bool = False
    """Whether it is for every project of the machine."""


class _Flight:
    """One pull that any number of callers wait for."""

    def __init__(self) -> None:
        self.listeners: list[Progress] = []
        self.task: asyncio.Task[Image] | None = None

    def report(self, what: str, done: int, total: int) -> None:
        for listener in tuple(self.listeners):
            listener(what, done, total)


class Images:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._everybodys = asyncio.Semaphore(_PULLS)
        self._flights: dict[tuple[str, Wanted], _Flight] = {}

    def check(self, wanted: Wanted) -> None:
        """Refuse a request that the caller may not make."""
        if wanted.shared and not wanted.operator:
            raise AccessDenied(
                "shared: only the local user of the server's machine may do this", field="shared"
            )
        registry = parse_reference(wanted.reference).endpoint
        listed = self._context.settings.insecure_registries
        if wanted.insecure and not wanted.operator and registry not in listed:
            raise AccessDenied(
                f"insecure: only the local user of the server's machine may use {registry} that way",
                hint="the operator can list it in insecure_registries",
                field="insecure",
            )

    async def pull(self, project: str, wanted: Wanted, *, progress: Progress | None = None) -> Image:
        """Fetch an image, by the rules for the caller that wants it.

        Callers that want the same at the same time wait for one pull, and each of them sees its progress.
        Only a few run at a time, so that pulls take neither all of the worker nor all of the disk at once. A
        pull whose last caller is cancelled leaves the queue; one that has begun continues, and keeps its slot
        until it is done.
        """
        self.check(wanted)
        key = (project, wanted)
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            flight.task = asyncio.create_task(
                self._queued(key, flight, ACTOR.get()), name=f"pull {wanted.reference}"
            )
        listener = progress or _unheard
        flight.listeners.append(listener)
        assert flight.task is not None
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.listeners.remove(listener)
            if not flight.listeners and not flight.task.done():
                self._flights.pop(key, None)  # a later caller does not join a pull that is being given up
                flight.task.cancel()

    async def _queued(self, key: tuple[str, Wanted], flight: _Flight, actor: str | None) -> Image:
        project, wanted = key
        try:
            turn = self._turns.setdefault(project, asyncio.Semaphore(_PULLS_OF_PROJECT))
            async with contextlib.AsyncExitStack() as places:
                await places.enter_async_context(turn)
                await places.enter_async_context(self._everybodys)
                kept = places.pop_all()
            work = self._pull(project, wanted, flight.report, actor, kept)
            return await asyncio.shield(self._context.spawn(work, f"pull {wanted.reference}"))
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]

    async def _pull(
        self,
        project: str,
        wanted: Wanted,
        progress: Progress | None,
        actor: str | None,
        places: contextlib.AsyncExitStack,
    ) -> Image:
        async with places:
            return await self._fetch(project, wanted, progress, actor)

    async def _fetch(
        self, project: str, wanted: Wanted, progress: Progress | None, actor: str | None
    ) -> Image:
        pulled = await self._context.storage.pull_image(
            wanted.reference,
            platform=wanted.platform,
            auth=wanted.auth,
            access=self._access(wanted),
            project_id=None if wanted.shared else project,
            allowance=self._allowance(),
            progress=progress,
        )
        self._context.record("image.pulled", project, actor=actor, image=pulled.id, name=wanted.reference)
        return pulled

    def _allowance(self) -> Allowance:
        settings = self._context.settings
        return Allowance(
            image_bytes=settings.max_image_bytes,
            image_entries=settings.max_image_entries,
            images=settings.max_images,
            project_bytes=settings.max_images_bytes,
            free_percent=settings.min_free_percent,
            seconds=settings.max_pull_ms / 1000,
        )

    async def list(self, project: str) -> list[Image]:
        """Return the images that a project's sandboxes can start from."""
        return await self._context.storage.list_images(project_id=project)

    async def delete(self, project: str, name: str, *, operator: bool) -> Image:
        """Remove a project's name of an image, or as the operator a shared one; the last deletes the image.

        Raises:
            WrongState: a snapshot or session of the project uses it, or of any project if it is shared.
        """
        found = await self._context.storage.get_image(name, project_id=project)
        own = found.owners.get(project)
        if not own and not operator:
            raise AccessDenied(
                f"{name} is shared by all projects: only the local user of the server's machine may delete it"
            )
        if own:
            self._check_unused(project, found.id, name)
        owner = project if own else None
        # A sandbox that was just destroyed still has files here, and the worker would count them.
        await self._context.cleared_away()
        await self._context.storage.remove_image(name, project_id=owner)
        self._context.record("image.deleted", project, image=found.id, name=name)
        return found

    def _check_unused(self, project: str, image: str, name: str) -> None:
        store = self._context.store
        used = [row.id for row in store.snapshots.standing_on(project, image)]
        used += [row.id for row in store.sessions.standing_on(project, image)]
        if used:
            raise WrongState(
                f"the image {name} is in use by {', '.join(used[:3])}{' …' if len(used) > 3 else ''}",
                hint="remove the snapshots and stop the sessions that use it first",
                image=image,
                used_by=used,
            )

    def _access(self, wanted: Wanted) -> Access:
        settings = self._context.settings
        if wanted.operator:
            return Access(Reach(private=True, proxy=settings.proxy), insecure=wanted.insecure)
        reach = Reach(
            private=settings.private_sources,
            own_ports=self._context.network.own_ports,
            proxy=settings.proxy,
        )
        return Access(
            reach,
            insecure=wanted.insecure,
            insecure_hosts=tuple(settings.insecure_registries),
            operator=False,
        )


def _unheard(what: str, done: int, total: int) -> None:
    """Take the progress of a pull that its caller does not want to hear of."""
