"""Batches: several sandboxes made by one request, all of them or none.

Each row says which batch it is made in, until the last of them runs; then one transaction takes that from all
of them. A batch that fails is undone. What a crash left of one is removed by the server that starts next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sandkeep.engine.context import Context
from sandkeep.engine.names import check_name, keyed_id, keyed_name, new_id, new_name
from sandkeep.engine.sandboxes import Sandboxes, Started
from sandkeep.errors import LimitReached
from sandkeep.spec import SandboxSpec
from sandkeep.store.rows import Sandbox

_AT_ONCE = 8
"""Sandboxes of one batch that are made, or undone, at the same time."""


class Batches:
    def __init__(self, context: Context, sandboxes: Sandboxes) -> None:
        self._context = context
        self._store = context.store
        self._sandboxes = sandboxes
        self._open: set[str] = set()
        """Batches that requests of this process are making."""

    async def create(
        self,
        project: str,
        spec: SandboxSpec,
        count: int,
        *,
        key: str | None = None,
        exact: bool = False,
        operator: bool = False,
    ) -> list[Started]:
        """Make ``count`` sandboxes of the same configuration, each with a running session, or none.

        They are called ``NAME-1``, ``NAME-2`` and so on; without a name each gets one of its own. Calls with
        the same ``key`` make one batch between them. ``operator``: the local user of the machine asks.
        """
        batch = self._id(project, key)
        names = _names(project, spec.name, count, batch)
        async with self._context.lock(batch, "batch"):
            made = self._made(project, names, batch)
            return made or await self._make(project, spec, names, batch, exact=exact, operator=operator)

    async def fork(
        self,
        project: str,
        source: str,
        changes: Mapping[str, Any],
        count: int,
        *,
        live: bool = False,
        key: str | None = None,
        operator: bool = False,
    ) -> list[Started]:
        """Make ``count`` forks of one sandbox, from one snapshot of it; see `Sandboxes.fork`."""
        batch = self._id(project, key)
        names = _names(project, changes.get("name"), count, batch)
        async with self._context.lock(batch, "batch"):
            made = self._made(project, names, batch)
            if made is not None:
                return made  # without another checkpoint
            spec, left_out = await self._sandboxes.forked(
                project, source, changes, live=live, key=key, operator=operator
            )
            made = await self._make(project, spec, names, batch, operator=operator)
            return [replace(each, left_out=left_out) for each in made]

    async def finish(self) -> None:
        """Remove what is left of batches that did not come to their end."""
        for sandbox in self._store.sandboxes.of_batches_everywhere():
            if sandbox.batch not in self._open:
                await self._context.alone(sandbox.id, self._sandboxes.remove_of_batch(sandbox))

    def _id(self, project: str, key: str | None) -> str:
        return new_id("box", now_ms=self._context.now_ms()) if key is None else keyed_id("box", project, key)

    def _made(self, project: str, names: Sequence[str], batch: str) -> list[Started] | None:
        """Return what an earlier call with the same key has made."""
        made = [self._sandboxes.made(project, name, _key(batch, number)) for number, name in enumerate(names)]
        found = [each for each in made if each is not None and each.sandbox.batch is None]
        return found if len(found) == len(names) else None

    async def _make(
        self,
        project: str,
        spec: SandboxSpec,
        names: Sequence[str],
        batch: str,
        *,
        exact: bool = False,
        operator: bool,
    ) -> list[Started]:
        await self.finish()
        self._check_room(project, len(names))
        turns = asyncio.Semaphore(_AT_ONCE)
        failed = False

        async def make(number: int, name: str) -> Started | None:
            nonlocal failed
            async with turns:
                if failed:
                    return None  # all of them are undone anyway
                try:
                    return await self._sandboxes.create(
                        project,
                        replace(spec, name=name),
                        key=_key(batch, number),
                        exact=exact,
                        batch=batch,
                        operator=operator,
                    )
                except BaseException:
                    failed = True
                    raise

        self._open.add(batch)
        try:
            found = await asyncio.gather(
                *(make(number, name) for number, name in enumerate(names)), return_exceptions=True
            )
            for each in found:
                if isinstance(each, BaseException):
                    raise each
            self._store.sandboxes.end_batch(project, batch)
        except BaseException:
            await self._undo(batch)
            raise
        finally:
            self._open.discard(batch)
        return [replace(each, sandbox=replace(each.sandbox, batch=None)) for each in _started(found)]

    async def _undo(self, batch: str) -> None:
        """Destroy what was made of a batch. Upkeep does what cannot be done now."""
        turns = asyncio.Semaphore(_AT_ONCE)

        async def remove(sandbox: Sandbox) -> None:
            async with turns:
                await self._context.alone(sandbox.id, self._sandboxes.remove_of_batch(sandbox))

        made = [row for row in self._store.sandboxes.of_batches_everywhere() if row.batch == batch]
        await asyncio.gather(*(remove(sandbox) for sandbox in made))

    def _check_room(self, project: str, count: int) -> None:
        settings = self._context.settings
        there = self._store.sandboxes.count(project), self._store.sessions.count_active(project)
        most = settings.max_sandboxes, settings.max_active_sessions
        for limit, have, value in zip(("sandboxes", "sessions"), there, most, strict=True):
            if have + count > value:
                raise LimitReached(
                    f"the project has {have} of {value} {limit}, which leaves no room for {count} more",
                    limit=limit,
                    value=value,
                )


def _started(found: Sequence[Any]) -> list[Started]:
    return [each for each in found if isinstance(each, Started)]


def _key(batch: str, number: int) -> str:
    return f"{batch}/{number}"


def _names(project: str, name: str | None, count: int, batch: str) -> list[str]:
    """Return the names of a batch, different ones."""
    if name is not None:
        return [check_name(f"{name}-{number}") for number in range(1, count + 1)]
    names = {number: keyed_name(project, _key(batch, number)) for number in range(count)}
    taken: set[str] = set()
    for number, each in names.items():
        if each in taken:
            names[number] = new_name()
        taken.add(names[number])
    return list(names.values())
