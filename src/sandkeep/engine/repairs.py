"""Repair: restore what can be restored, and roll back to an intact snapshot where it cannot."""

from __future__ import annotations

from dataclasses import dataclass, field

from sandkeep.engine.context import Context
from sandkeep.engine.damage import Damaged
from sandkeep.engine.snapshots import Snapshots
from sandkeep.store import PageRequest
from sandkeep.store.rows import Sandbox, Snapshot


@dataclass(frozen=True, slots=True)
class Left:
    """A sandbox that is still damaged."""

    sandbox: str
    snapshot: str
    layer: str
    why: str
    older: str | None
    """Its newest intact snapshot."""


@dataclass(slots=True)
class RepairReport:
    done: list[str] = field(default_factory=list)
    """What was restored or deleted, as text for people."""
    left: list[Left] = field(default_factory=list)


class Repairs:
    def __init__(self, context: Context, snapshots: Snapshots) -> None:
        self._context = context
        self._store = context.store
        self._snapshots = snapshots

    async def repair(
        self, project: str, name: str | None = None, *, use_older: bool = False, drop: bool = False
    ) -> RepairReport:
        """Check for damage and repair what can be repaired, for one sandbox or for all.

        Args:
            use_older: let damaged sandboxes continue from their newest intact snapshot.
            drop: delete snapshots that cannot be read, except one that a sandbox starts from.
        """
        only = None if name is None else self._store.sandboxes.get(project, name).id
        report = RepairReport()
        report.done += await self._context.damage.restore_records()
        await self._context.damage.find_damage()
        for sandbox in self._sandboxes(project):
            if only in (None, sandbox.id):
                await self._one(sandbox, report, use_older=use_older, drop=drop)
        return report

    def _sandboxes(self, project: str) -> list[Sandbox]:
        found: list[Sandbox] = []
        cursor: str | None = None
        while True:
            page = self._store.sandboxes.page(project, PageRequest(limit=100, cursor=cursor))
            found += page.items
            cursor = page.next
            if cursor is None:
                return found

    async def _one(self, sandbox: Sandbox, report: RepairReport, *, use_older: bool, drop: bool) -> None:
        async with self._context.lock(sandbox.project, sandbox.name):
            found = self._context.damage.of(sandbox)
            if found is not None:
                older = self._older(sandbox)
                if use_older and older is not None:
                    self._go_back(sandbox, older, found, report)
                else:
                    left = Left(
                        sandbox.name,
                        sandbox.current_snapshot or "",
                        found.layer,
                        found.why,
                        None if older is None else older.id,
                    )
                    report.left.append(left)
        if drop:
            await self._drop(sandbox, report)

    def _older(self, sandbox: Sandbox) -> Snapshot | None:
        """Return the newest intact snapshot: the sandbox's own, or an ancestor of those."""
        own = self._store.snapshots.live_of(sandbox.project, sandbox.id)
        intact = [row for row in own if self._context.damage.of_layer(row.layer) is None]
        return intact[0] if intact else None

    def _go_back(self, sandbox: Sandbox, older: Snapshot, found: Damaged, report: RepairReport) -> None:
        self._store.sandboxes.update(
            sandbox.project, sandbox.name, now_ms=self._context.now_ms(), current_snapshot=older.id
        )
        self._context.record(
            "sandbox.repaired",
            sandbox.project,
            sandbox=(sandbox.id, sandbox.name),
            snapshot=older.id,
            instead_of=sandbox.current_snapshot,
            why=found.why,
        )
        report.done.append(f"{sandbox.name} goes back to snapshot {older.id}")

    async def _drop(self, sandbox: Sandbox, report: RepairReport) -> None:
        pinned = self._store.snapshots.pinned(sandbox.project)
        for row in self._store.snapshots.live_of(sandbox.project, sandbox.id):
            if row.id not in pinned and self._context.damage.of_layer(row.layer) is not None:
                await self._snapshots.delete(sandbox.project, row.id)
                report.done.append(f"snapshot {row.id} of {sandbox.name} is deleted")
