"""Adopt a data directory as it is: files that its store does not know become sandboxes again.

A layer records its parent, and a session what it was started with. Neither records the name or project of its
sandbox, or its network policy. So each becomes a sandbox ``recovered-…`` in the project of callers without a
token, and has no network until a caller gives it one:

* a layer without a child, as the sandbox's current snapshot;
* a session that has not ended: a running one is watched again, the files of any other are kept;
* the newest layer of a drive, as a drive.

Everything else is left where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sandkeep.engine.beginnings import first_row
from sandkeep.engine.context import Context
from sandkeep.engine.names import new_id
from sandkeep.engine.sandboxes import Sandboxes
from sandkeep.errors import SandkeepError
from sandkeep.host.driver import SessionRef
from sandkeep.host.layers.values import Layer
from sandkeep.host.reports import DriveOrigin
from sandkeep.host.rootfs import VENDOR_WORK, WORK
from sandkeep.policy import NetworkPolicy
from sandkeep.spec import SandboxSpec
from sandkeep.store.rows import Drive, Sandbox, SessionStatus, Snapshot, SnapshotMethod, StoredMount

_DRIVE = "drive@"


@dataclass(frozen=True, slots=True)
class Adopted:
    """A layer or session that has a name again."""

    kind: str
    """``snapshot``, ``session`` or ``drive``."""
    name: str
    """Name of the sandbox or drive it is now."""
    found: str
    """Id of the layer or session."""


class Adoption:
    def __init__(self, context: Context, sandboxes: Sandboxes) -> None:
        self._context = context
        self._store = context.store
        self._sandboxes = sandboxes
        now = context.now_ms()
        made = self._store.projects.ensure(
            new_id("prj", now_ms=now), team="local", name="default", now_ms=now
        )
        self._project = made.id
        self._adopted: list[Adopted] = []

    async def run(self) -> list[Adopted]:
        await self._context.alone("recover", self._context.storage.recover_layers())
        layers = await self._context.storage.list_layers()
        below = {layer.parent for layer in layers}
        for ref in await self._context.driver.sessions():
            if self._store.sessions.find(ref.session) is None:
                await self._context.alone(ref.session, self._adopt_session(ref))
        for layer in layers:
            if layer.id not in below and not self._is_known(layer.id):
                await self._context.alone(layer.id, self._adopt_layer(layer))
        for adopted in self._adopted:
            self._context.log("adopted", kind=adopted.kind, name=adopted.name, found=adopted.found)
        return self._adopted

    def _is_known(self, layer: str) -> bool:
        if self._store.snapshots.of_layer_everywhere(layer) or layer in self._store.layers_in_use():
            return True
        # A layer of a session that is on record and not ended is kept when that session is brought to its
        # end.
        session = self._store.sessions.find(f"sbx_{layer[4:]}")
        return session is not None and session.status not in _ENDED

    # --- layers ------------------------------------------------------------------------------------------

    async def _adopt_layer(self, layer: Layer) -> None:
        if layer.image.startswith(_DRIVE):
            holder = self._add_drive(layer.id, layer.image.removeprefix(_DRIVE))
        else:
            holder = self._add_snapshot(layer, await self._working_directory(layer))
        await self._context.storage.hold_layer(layer.id, holder)

    def _add_drive(self, layer: str | None, drive_id: str, *, session: str | None = None) -> str:
        now = self._context.now_ms()
        if self._store.drives.find_by_id(self._project, drive_id) is not None:
            drive_id = new_id("drv", now_ms=now)
        drive = Drive(
            id=drive_id,
            project=self._project,
            name=_name(drive_id),
            region=SandboxSpec().region,
            max_size_bytes=1 << 40,
            layer=layer,
            current_session=session,
            created_ms=now,
            updated_ms=now,
        )
        self._store.drives.add(drive)
        self._adopted.append(Adopted("drive", drive.name, layer or session or ""))
        return drive.id

    async def _working_directory(self, layer: Layer) -> str:
        image = layer.image
        if not image.startswith("host"):
            try:
                found = await self._context.storage.get_image(image)
            except SandkeepError:
                pass  # its sandbox will not start, and the error will say why
            else:
                if found.defaults.own_cwd:
                    return found.defaults.cwd
        # Nothing else shows which kind of client made it. Every image has the vendor's directories.
        written = await self._context.storage.has_directory(layer.id, WORK)
        return WORK if written else VENDOR_WORK

    def _add_snapshot(self, layer: Layer, cwd: str) -> str:
        now = self._context.now_ms()
        sandbox = self._sandbox(layer.id, layer.image, cwd)
        session = replace(
            first_row(self._context, sandbox, now_ms=now, source=None),
            status=SessionStatus.RUNNING,
            started_ms=now,
        )
        original = f"sbx_{layer.id[4:]}"
        if self._store.sessions.find(original) is None:
            session = replace(session, id=original)  # its output may still exist
        snapshot = Snapshot(
            id=f"snap_{layer.id[4:]}",
            project=self._project,
            sandbox=sandbox.id,
            source_session=session.id,
            layer=layer.id,
            image=layer.image,
            host_key=layer.host_key,
            region=sandbox.region,
            size_bytes=layer.size_bytes or 0,
            created_ms=layer.created_ms,
            updated_ms=now,
            method=SnapshotMethod.AUTOMATIC,
        )
        if self._store.snapshots.find(snapshot.id) is not None:
            snapshot = replace(snapshot, id=new_id("snap", now_ms=now))
        with self._store.transaction():
            self._store.sandboxes.add(replace(sandbox, current_snapshot=snapshot.id))
            self._store.sessions.start(session)
            self._store.sessions.move(
                self._project,
                session.id,
                SessionStatus.STOPPED,
                expected={SessionStatus.RUNNING},
                now_ms=now,
                stop_reason="recovered",
            )
            self._store.snapshots.add(snapshot)
            self._context.record("sandbox.recovered", self._project, sandbox=_named(sandbox), layer=layer.id)
        self._adopted.append(Adopted("snapshot", sandbox.name, layer.id))
        return snapshot.id

    def _sandbox(self, found: str, image: str, cwd: str) -> Sandbox:
        name = _name(found)
        spec = SandboxSpec(name=name, network_policy=NetworkPolicy.deny_all())
        return self._sandboxes.row(self._project, name, spec, image, None, cwd=cwd)

    # --- sessions ----------------------------------------------------------------------------------------

    async def _adopt_session(self, ref: SessionRef) -> None:
        origin = await self._context.driver.origin(ref)
        if origin is None:
            return  # it is over; its files are a layer
        now = self._context.now_ms()
        sandbox = self._sandbox(ref.session, origin.image, origin.cwd or VENDOR_WORK)
        session = replace(
            first_row(self._context, sandbox, now_ms=now, source=None),
            id=ref.session,
            generation=ref.generation,
            status=SessionStatus.RUNNING,
            started_ms=now,
            deadline_ms=origin.deadline_ms,
            layer_base=origin.layer_id,
            network_policy=self._context.policies.stored(self._project, NetworkPolicy.deny_all()),
        )
        with self._store.transaction():
            self._store.sandboxes.add(sandbox)
            self._store.sessions.start(session)
            self._context.record(
                "sandbox.recovered", self._project, sandbox=_named(sandbox), session=session.id
            )
        mounts = self._mounts(ref.session, origin.drives)
        if mounts:
            self._store.sessions.set_mounts(self._project, session.id, mounts)
        self._adopted.append(Adopted("session", sandbox.name, ref.session))

    def _mounts(self, session_id: str, drives: Sequence[DriveOrigin]) -> dict[str, StoredMount]:
        """Return the mounts of a session, by path; recreate the drives that it writes to."""
        mounts = {}
        for drive in drives:
            if drive.read_only:
                mounts[drive.target] = StoredMount("unknown", "snapshot")
                continue
            drive_id = new_id("drv", now_ms=self._context.now_ms())
            self._add_drive(drive.layer_id, drive_id, session=session_id)
            mounts[drive.target] = StoredMount(_name(drive_id), "read-write")
        return mounts


_ENDED = (SessionStatus.STOPPED, SessionStatus.FAILED, SessionStatus.ABORTED)


def _name(found: str) -> str:
    """Return a name from the id, whose first characters are a time and last ones random."""
    return f"recovered-{found.partition('_')[2] or found}"


def _named(sandbox: Sandbox) -> tuple[str, str]:
    return sandbox.id, sandbox.name
