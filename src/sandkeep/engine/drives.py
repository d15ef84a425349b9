"""Drives: named filesystems of their own, shown inside sandboxes.

A drive's content is a chain of layers, like a snapshot's. Mounted read-write it is an overlay of its own
whose upper becomes the drive's next layer when the session ends; mounted as a snapshot it is the chain as it
was when the session started, read-only. So a session that crashes loses nothing of a drive, and readers
never see half of a write.
"""

from __future__ import annotations

from dataclasses import replace

from sandkeep.engine.context import Context
from sandkeep.engine.names import check_name, new_id
from sandkeep.errors import DriveNotInitialized, LayerError
from sandkeep.host.rootfs import Lower, Rootfs, Slot
from sandkeep.store.rows import Drive, Session

DEFAULT_SIZE = 1 << 40


class Drives:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store

    async def get_or_create(
        self, project: str, name: str, *, region: str, max_size_bytes: int | None = None
    ) -> tuple[Drive, bool]:
        """The drive of that name, and whether this call made it."""
        check_name(name, kind="drive")
        found = self._store.drives.find(project, name)
        if found is not None:
            return found, False
        now = self._context.now_ms()
        drive = Drive(
            id=new_id("drv", now_ms=now),
            project=project,
            name=name,
            region=region,
            max_size_bytes=max_size_bytes or DEFAULT_SIZE,
            created_ms=now,
            updated_ms=now,
        )
        self._store.drives.add(drive)
        self._context.record("drive.created", project, drive=drive.id, name=name)
        return drive, True

    def get(self, project: str, name: str) -> Drive:
        """By name or by id."""
        return self._store.drives.find_by_id(project, name) or self._store.drives.get(project, name)

    async def fork(self, project: str, source: str, *, name: str) -> Drive:
        """A new drive that starts with the content the source has now."""
        check_name(name, kind="drive")
        origin = self.get(project, source)
        if origin.layer is None:
            raise DriveNotInitialized(f"nothing has been written to drive {origin.name}", drive=origin.name)
        now = self._context.now_ms()
        drive = replace(
            origin,
            id=new_id("drv", now_ms=now),
            name=name,
            parent=origin.id,
            root=origin.root or origin.id,
            current_session=None,
            created_ms=now,
            updated_ms=now,
        )
        await self._context.storage.call("layer.hold", layer=origin.layer, holder=drive.id)
        try:
            self._store.drives.add(drive)
        except BaseException:
            await self._context.storage.call("layer.release", layer=origin.layer, holder=drive.id)
            raise
        self._context.record("drive.created", project, drive=drive.id, name=name, source=origin.id)
        return drive

    async def delete(self, project: str, name: str) -> Drive:
        drive = self._store.drives.delete(project, self.get(project, name).name)
        self._context.record("drive.deleted", project, drive=drive.id, name=drive.name)
        if drive.layer is not None:
            await self._context.storage.call("layer.release", layer=drive.layer, holder=drive.id)
            self._context.spawn(collect(self._context), "collect layers", finish=True)
        return drive


async def collect(context: Context) -> None:
    """Delete the layers nobody needs any more."""
    await context.storage.call("layer.collect")


def _slot(index: int) -> str:
    return f"drive{index}"


async def mount(context: Context, session: Session, rootfs: Rootfs) -> Rootfs:
    """The root filesystem with the session's drives in it. Takes the drives it will write to."""
    slots = list(rootfs.slots)
    for index, (path, how) in enumerate(sorted(session.mounts.items())):
        drive = context.store.drives.get(session.project, how.drive)
        writable = how.mode == "read-write"
        if writable:
            drive = context.store.drives.attach(
                session.project, drive.name, session.id, now_ms=context.now_ms()
            )
        lowers: tuple[Lower, ...] = ()
        if drive.layer is not None:
            if not writable:
                await context.storage.call("layer.hold", layer=drive.layer, holder=session.id)
            answer = await context.storage.call("layer.directories", layer=drive.layer)
            lowers = tuple(Lower(directory) for directory in answer["directories"])
        slots.append(Slot(_slot(index), path, lowers, drive=True, read_only=not writable))
    return replace(rootfs, slots=tuple(slots))


async def _shorten(context: Context, layer: str) -> None:
    """Every session that writes to a drive adds a layer to it; keep them few."""
    try:
        await context.storage.call(
            "layer.compact", tip=layer, image=None, max_depth=context.settings.fold_depth
        )
    except LayerError:
        pass  # deleted meanwhile


async def let_go(context: Context, session: Session) -> None:
    """Forget what a session that never ran was to see; what it was to write, its end gives back by itself."""
    if any(how.mode != "read-write" for how in session.mounts.values()):
        await context.storage.call("layer.release-all", holder=session.id)
        context.spawn(collect(context), "collect layers", finish=True)


async def detach(context: Context, session: Session) -> None:
    """Make what an ended session wrote to its drives their content, and let go of them. Can be repeated."""
    read = False
    for index, (_, how) in enumerate(sorted(session.mounts.items())):
        if how.mode != "read-write":
            await context.storage.call("layer.discard-slot", session=session.id, slot=_slot(index))
            read = True
            continue
        drive = context.store.drives.find(session.project, how.drive)
        if drive is None:
            continue
        layer = f"lay_{session.id[4:]}d{index}"
        if drive.current_session != session.id or drive.layer == layer:
            continue
        answer = await context.storage.call(
            "layer.publish-slot",
            session=session.id,
            slot=_slot(index),
            layer=layer,
            parent=drive.layer,
            image=f"drive@{drive.id}",
            holder=drive.id,
        )
        if answer["published"]:
            context.store.drives.commit(
                session.project, drive.name, session.id, layer=layer, now_ms=context.now_ms()
            )
            context.spawn(_shorten(context, layer), f"fold {layer}")
            if drive.layer is not None:
                await context.storage.call("layer.release", layer=drive.layer, holder=drive.id)
    if read:
        # By now the drive may have another layer than the one this session saw, or be gone.
        await context.storage.call("layer.release-all", holder=session.id)
        context.spawn(collect(context), "collect layers", finish=True)
