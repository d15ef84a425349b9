"""Drives: named filesystems of their own, shown inside sandboxes.

A drive's content is a chain of layers, like a snapshot's. Mounted read-write it is an overlay of its own
whose upper becomes the drive's next layer when the session ends; mounted as a snapshot it is the chain at the
start of the session, read-only. So a session that crashes loses nothing of a drive, and readers never see
half of a write.
"""

from __future__ import annotations

from dataclasses import replace

from sandkeep.engine.context import Context, with_room
from sandkeep.engine.garbage import collect_soon
from sandkeep.engine.names import check_name, new_id
from sandkeep.errors import DriveAttached, DriveNotInitialized, LayerError
from sandkeep.host.rootfs import Lower, Rootfs, Slot
from sandkeep.store.rows import Drive, Session

DEFAULT_SIZE = 1 << 40
_TO_TIDY_UP = 1 << 20
"""Bytes that a session may write to a full drive: in an overlay deleting files takes space too."""


class Drives:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store

    async def get_or_create(
        self, project: str, name: str, *, region: str, max_size_bytes: int | None = None
    ) -> tuple[Drive, bool]:
        """Return the drive of that name, and whether this call made it."""
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
        with self._store.transaction():
            self._store.drives.add(drive)
            self._context.record("drive.created", project, drive=drive.id, name=name)
        return drive, True

    def get(self, project: str, name: str) -> Drive:
        """Return a drive by its name or its id."""
        return self._store.drives.find_by_id(project, name) or self._store.drives.get(project, name)

    async def fork(self, project: str, source: str, *, name: str) -> Drive:
        """Create a drive with the content of the source, as written by ended sessions.

        What a running session has written to the source is not included.
        """
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
        await self._context.storage.hold_layer(origin.layer, drive.id)
        try:
            with self._store.transaction():
                self._store.drives.add(drive)
                self._context.record("drive.created", project, drive=drive.id, name=name, source=origin.id)
        except BaseException:
            await self._context.storage.release_layer(origin.layer, drive.id)
            raise
        return drive

    @with_room
    async def delete(self, project: str, name: str) -> Drive:
        """Delete a drive. Raises `DriveAttached` while a session writes to it or a sandbox mounts it."""
        with self._store.transaction():
            name = self.get(project, name).name
            shown_by = self._store.sandboxes.mounting(project, name, mode="snapshot")
            if shown_by:
                raise DriveAttached(
                    f"drive {name} is mounted as a snapshot by sandbox {shown_by[0].name}",
                    drive=name,
                    sandbox=shown_by[0].name,
                    hint="that sandbox could not be resumed; remove it, or change its mounts, first",
                )
            drive = self._store.drives.delete(project, name)
            self._context.record("drive.deleted", project, drive=drive.id, name=drive.name)
        if drive.layer is not None:
            await self._context.storage.release_layer(drive.layer, drive.id)
            collect_soon(self._context)
        return drive


def _slot(index: int) -> str:
    return f"drive{index}"


async def mount(context: Context, session: Session, rootfs: Rootfs) -> Rootfs:
    """Return the root filesystem with the session's drives; attach the drives that the session writes to."""
    slots = list(rootfs.slots)
    for index, (path, how) in enumerate(sorted(session.mounts.items())):
        drive = context.store.drives.get(session.project, how.drive)
        writable = how.mode == "read-write"
        if writable:
            drive = context.store.drives.attach(
                session.project, drive.name, session.id, now_ms=context.now_ms()
            )
        lowers: tuple[Lower, ...] = ()
        room = drive.max_size_bytes if writable and drive.max_size_bytes < DEFAULT_SIZE else None
        if drive.layer is not None:
            if not writable:
                await context.storage.hold_layer(drive.layer, session.id)
            content = await context.storage.drive_content(drive.layer, sized=room is not None)
            if room is not None and (content.size_bytes or 0) >= room:
                # Some of that may have been deleted or rewritten by later sessions.
                await context.storage.fold_layers(drive.layer, image=None, max_depth=1)
                content = await context.storage.drive_content(drive.layer, sized=True)
            lowers = tuple(Lower(directory) for directory in content.directories)
            if room is not None:
                room = max(_TO_TIDY_UP, room - (content.size_bytes or 0))
        slots.append(Slot(_slot(index), path, lowers, drive=True, read_only=not writable, room_bytes=room))
    return replace(rootfs, slots=tuple(slots))


async def _fold_chain(context: Context, layer: str) -> None:
    """Fold a drive's layers when there are many: every session that writes to the drive adds one."""
    try:
        await context.storage.fold_layers(layer, image=None, max_depth=context.settings.fold_depth)
    except LayerError:
        pass  # the drive was deleted meanwhile


def written(context: Context, session: Session) -> list[str]:
    """Return the layers that an ended session wrote to drives."""
    found = []
    for index, (_, how) in enumerate(sorted(session.mounts.items())):
        drive = context.store.drives.find(session.project, how.drive)
        if how.mode == "read-write" and drive is not None and drive.layer == _layer(session, index):
            found.append(drive.layer)
    return found


def _layer(session: Session, index: int) -> str:
    return f"lay_{session.id[4:]}d{index}"


async def release_snapshots(context: Context, session: Session) -> None:
    """Release the snapshots that a failed session held; its end releases the drives it would have written."""
    if any(how.mode != "read-write" for how in session.mounts.values()):
        await context.storage.release_holder(session.id)
        collect_soon(context)


async def detach(context: Context, session: Session) -> None:
    """Publish what an ended session wrote to its drives, and detach them. Safe to repeat."""
    read = False
    for index, (_, how) in enumerate(sorted(session.mounts.items())):
        if how.mode != "read-write":
            await context.storage.discard_slot(session.id, _slot(index))
            read = True
            continue
        drive = context.store.drives.find(session.project, how.drive)
        if drive is None:
            continue
        layer = _layer(session, index)
        if drive.current_session != session.id or drive.layer == layer:
            continue
        published = await context.storage.publish_slot(
            session.id,
            _slot(index),
            layer_id=layer,
            parent_id=drive.layer,
            image=f"drive@{drive.id}",
            holder=drive.id,
        )
        if published:
            context.store.drives.commit(
                session.project, drive.name, session.id, layer=layer, now_ms=context.now_ms()
            )
            context.spawn(_fold_chain(context, layer), f"fold {layer}")
            if drive.layer is not None:
                await context.storage.release_layer(drive.layer, drive.id)
    if read:
        # The drive may by now have another layer than the one this session saw, or be deleted.
        await context.storage.release_holder(session.id)
        collect_soon(context)
