"""Damage: which sandboxes need layers that cannot be used, and what can be restored.

A damaged file of one layer or session affects only the sandboxes that need it. Records that the store knows
are restored automatically when a data directory is opened: a session's specification, the record of a layer.
Remaining damage is remembered here, until the next check, and recorded in an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sandkeep.errors import LayerError, SandkeepError
from sandkeep.host.layers.sessions import SpecOutline
from sandkeep.host.layers.values import Examined
from sandkeep.store.rows import Sandbox, Session, SessionStatus, Snapshot

if TYPE_CHECKING:
    from sandkeep.engine.context import Context


@dataclass(frozen=True, slots=True)
class Damaged:
    """A layer that cannot be used, as callers of a sandbox that needs it see it."""

    layer: str
    why: str


class DamagedLayers:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store
        self._layers: dict[str, Damaged] = {}
        """For each unusable layer, the damaged one that is the cause, which may be far below."""
        self._reported: set[tuple[str, str]] = set()

    def of(self, sandbox: Sandbox) -> Damaged | None:
        """Return what prevents a sandbox from being resumed, as far as it is known."""
        if not self._layers or sandbox.current_snapshot is None:
            return None
        snapshot = self._store.snapshots.find(sandbox.current_snapshot)
        return None if snapshot is None else self._layers.get(snapshot.layer)

    def of_layer(self, layer: str) -> Damaged | None:
        return self._layers.get(layer)

    # --- putting back ------------------------------------------------------------------------------------

    async def restore_records(self) -> list[str]:
        """Restore the small records that the store knows; return what was restored, as text for people."""
        done = []
        specs = [self._spec(row) for row in self._started()]
        for session_id in await self._context.storage.restore_specs(specs):
            done.append(f"the specification of session {session_id}")
        examined = await self._context.storage.examine_layers()
        for layer in examined.damaged:
            if layer not in examined.parents and await self._restore_record(layer):
                done.append(f"the record of layer {layer}")
        for what in done:
            self._context.log("repaired", what=what)
        return done

    def _started(self) -> list[Session]:
        active = self._store.sessions.active_on_host(self._context.driver.host)
        return [session for session in active if session.status is not SessionStatus.PENDING]

    def _spec(self, session: Session) -> SpecOutline:
        """Return what a running session's ``spec.json`` must contain: the layers it runs on."""
        drives = [self._store.drives.find(session.project, how.drive) for how in session.mounts.values()]
        return SpecOutline(
            session_id=session.id,
            generation=session.generation,
            image=session.image,
            layer_id=session.layer_base,
            drive_layer_ids=tuple(sorted({drive.layer for drive in drives if drive and drive.layer})),
        )

    async def _restore_record(self, layer: str) -> bool:
        rows = self._store.snapshots.of_layer_everywhere(layer)
        if not rows:
            return False
        row = rows[0]
        below = None if row.parent is None else self._store.snapshots.find(row.parent)
        if row.parent is not None and below is None:
            return False
        try:
            return await self._context.storage.repair_layer(
                layer,
                parent_id=None if below is None else below.layer,
                image=row.image,
                host_key=row.host_key,
                created_ms=row.created_ms,
            )
        except LayerError:
            return False

    # --- finding -----------------------------------------------------------------------------------------

    async def find_damage(self) -> None:
        """Find again which layers cannot be used, and record it for the sandboxes that need them."""
        self._layers = broken(await self._context.storage.examine_layers(), self._needed())
        for snapshot in self._store.snapshots.live_everywhere() if self._layers else ():
            found = self._layers.get(snapshot.layer)
            if found is not None:
                self._report(snapshot, found)

    def _needed(self) -> set[str]:
        return self._store.layers_in_use()

    def _report(self, snapshot: Snapshot, found: Damaged) -> None:
        if (snapshot.id, found.why) in self._reported:
            return
        self._reported.add((snapshot.id, found.why))
        box = None
        if snapshot.sandbox is not None:
            box = self._store.sandboxes.find_by_id(snapshot.project, snapshot.sandbox)
        name = None if box is None else box.name
        self._context.log("damaged", sandbox=name, snapshot=snapshot.id, why=found.why)
        self._context.record(
            "sandbox.damaged",
            snapshot.project,
            sandbox=(snapshot.sandbox, name),
            snapshot=snapshot.id,
            layer=found.layer,
            why=found.why,
            current=box is not None and box.current_snapshot == snapshot.id,
        )

    async def notice(self, error: SandkeepError) -> None:
        """Check again when an operation met damage that was not known."""
        if isinstance(error, LayerError) and error.details.get("layer") not in self._layers:
            await self._context.alone("look for damage", self.find_damage())


def broken(examined: Examined, needed: set[str]) -> dict[str, Damaged]:
    """Return every unusable layer, with the one that is the cause: damaged, or missing below it."""
    parents, damaged = examined.parents, examined.damaged
    found: dict[str, Damaged] = {}
    for top in {*parents, *damaged, *needed}:
        passed: list[str] = []
        at: str | None = top
        blame: Damaged | None = None
        while at is not None and at not in passed:
            passed.append(at)
            if at in found:
                blame = found[at]
                break
            if at in damaged:
                blame = Damaged(at, damaged[at])
                break
            if at not in parents:
                above = f", which {passed[-2]} stands on," if len(passed) > 1 else ""
                blame = Damaged(at, f"layer {at}{above} is missing")
                break
            at = parents[at]
        if blame is not None:
            found.update(dict.fromkeys(passed, blame))
    return found
