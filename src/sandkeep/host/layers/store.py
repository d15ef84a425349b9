"""The layer store of one data directory: publish, look up, compose, reference, measure, delete, recover.

Blocking code for a process that may act on the files of every sandbox: root, or uid 0 of the outer user
namespace. Any number of threads and processes may use one store; see ``lock.py``. Long work (deleting,
folding, syncing, measuring) happens outside the lock.

A layer appears by one rename and is immutable from then on. Hidden names in ``layers/`` are unfinished work::

    .new-<layer>     being published; once it holds ``fs``, the publisher or ``recover`` finishes it
    .copy-<layer>    a checkpoint being copied; once it holds ``meta.json`` it will be finished
    .fold-<layer>    a fold being built; deleted unless it was completed
    .del-<name>      being deleted

A layer is kept as long as a holder, a child, or a session that has not ended needs it. It is deleted when all
of them have released it. A layer without references of which none was released has lost them: it is set aside
for days before it is deleted (``marks.py``).

Damage concerns one layer only. Other layers are read, all layers that may be below a damaged one are kept,
and ``repair.py`` restores its record where that follows from other files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from sandkeep.errors import InvalidRequest, LayerError, NotFound, WrongState
from sandkeep.host.layers import repair
from sandkeep.host.layers.below import Below
from sandkeep.host.layers.fold import merge
from sandkeep.host.layers.lock import FileLock
from sandkeep.host.layers.marks import KEPT_MS, Marks
from sandkeep.host.layers.sessions import lost_sessions, session_layers, slots_of
from sandkeep.host.layers.tree import disk_usage, remove_tree
from sandkeep.host.layers.values import (
    META,
    REPAIR_HINT,
    Doubt,
    Examined,
    Layer,
    Recovered,
    Retired,
    Swept,
    check_name,
    damaged,
    is_name,
    read_meta,
    write_meta,
)
from sandkeep.host.rootfs import Flavour, Lower, Rootfs
from sandkeep.linux.overlay import MOST_LAYERS, Way, choose_for_reading
from sandkeep.linux.syscalls import syncfs
from sandkeep.shared.locks import is_locked

RETIRED_GRACE_MS = 60_000
"""Time for which a replaced directory stays for a session that uses it but has no record yet."""
_Names = list[str]


class LayerStore:
    """The layer store of one data directory (see above). New layers get ``flavour``."""

    def __init__(self, data_dir: str, *, flavour: Flavour, way: Way | None = None) -> None:
        """Open the store. ``way`` is how overlays are mounted, by default the newest that works."""
        self.flavour: Flavour = flavour
        self._root = os.path.join(os.path.abspath(data_dir), "layers")
        self._sessions = os.path.join(os.path.abspath(data_dir), "sessions")
        os.makedirs(self._root, mode=0o700, exist_ok=True)
        self._way: Way = way or choose_for_reading(self._root)
        self._lock = FileLock(os.path.join(self._root, ".lock"))
        self._fold_lock = FileLock(os.path.join(self._root, ".lock-fold"))

    # --- making layers ---------------------------------------------------------------------------------

    def publish(
        self,
        session: str,
        *,
        layer: str,
        parent: str | None,
        image: str,
        host_key: str | None = None,
        holder: str | None = None,
        on_record: bool = False,
    ) -> Layer:
        """Publish a session's upper as a layer. Two renames for any size; safe to repeat after a crash.

        ``holder`` has a reference from the first moment, so that ``collect`` cannot delete the layer in
        between. The overlay may still be mounted, as long as none of the session's processes lives. With
        ``on_record`` the caller knows that the session ran on ``parent``; its files are kept even if
        ``parent`` is damaged.
        """
        check_name(session, "session")
        upper = os.path.join(self._sessions, session, "fs")
        with self._lock.exclusive():
            done = self._existing(layer, parent, image, host_key, on_record=on_record)
            if done is not None:
                return done
            staged = self._path(f".new-{layer}")
            if not os.path.lexists(os.path.join(staged, "fs")):
                if not os.path.isdir(upper):
                    raise NotFound(f"session {session} has no upper", kind="upper", name=session)
                self._prepare(staged, upper, layer, parent, image, host_key, holder)
                os.rename(upper, os.path.join(staged, "fs"))
            os.rename(staged, self._path(layer))
            return self._require(layer) if on_record else self._get(layer)

    def adopt(
        self,
        *,
        layer: str,
        parent: str | None,
        image: str,
        host_key: str | None = None,
        holder: str | None = None,
    ) -> Layer:
        """Publish the finished checkpoint copy at ``copy_directory(layer)`` as a layer; safe to repeat."""
        with self._lock.exclusive():
            done = self._existing(layer, parent, image, host_key)
            if done is not None:
                return done
            staged = self._path(f".copy-{layer}")
            copy = os.path.join(staged, "fs")
            if not os.path.isdir(copy):
                raise NotFound(f"no copy for layer {layer}", kind="copy", name=layer)
            if is_locked(copy):
                raise WrongState(f"the copy for layer {layer} is still being made", layer=layer)
            self._prepare(staged, copy, layer, parent, image, host_key, holder)
            os.rename(staged, self._path(layer))
            return self._get(layer)

    def copy_directory(self, layer: str) -> str:
        """Return where to copy a checkpoint for ``adopt``; the parent exists, the directory does not."""
        staged = self._path(f".copy-{check_name(layer, 'layer')}")
        os.makedirs(staged, mode=0o700, exist_ok=True)
        return os.path.join(staged, "fs")

    def discard_copy(self, layer: str) -> None:
        """Delete the copy of a failed checkpoint; one that is still being copied is left to ``recover``."""
        staged = self._path(f".copy-{check_name(layer, 'layer')}")
        with self._lock.exclusive():
            if not is_locked(os.path.join(staged, "fs")):
                self._doom(staged, f".del-{layer}")
        self._finish_deletions()

    def discard(self, session: str) -> None:
        """Delete a session's upper."""
        check_name(session, "session")
        with self._lock.exclusive():
            self._doom(os.path.join(self._sessions, session, "fs"), f".del-upper-{session}")
        self._finish_deletions()

    def _existing(
        self, layer: str, parent: str | None, image: str, host_key: str | None, *, on_record: bool = False
    ) -> Layer | None:
        """Return the finished layer, or ``None`` when it can be made now."""
        check_name(layer, "layer")
        directory = self._path(layer)
        if os.path.isdir(directory):
            # The layer was published and then damaged: the caller that repeats the call knows its record.
            repair.rebuild(directory, self._described(layer, parent, image, host_key))
        if self._read(layer) is None:
            if parent is not None and not on_record:
                self._get(parent)
            return None
        done = self._require(layer) if on_record else self._get(layer)
        if done.image != image or (done.parent != parent and done.directory == "fs"):
            raise WrongState(f"layer {layer} exists already, with other content", layer=layer)
        return done

    def _described(self, layer: str, parent: str | None, image: str, host_key: str | None) -> Layer:
        return Layer(
            id=layer,
            parent=parent,
            image=image,
            flavour=self.flavour,
            host_key=host_key,
            created_ms=_now_ms(),
            synced_ms=None,
            size_bytes=None,
            depth=0,
            slots=(),
        )

    def _prepare(
        self,
        staged: str,
        upper: str,
        layer: str,
        parent: str | None,
        image: str,
        host_key: str | None,
        holder: str | None,
    ) -> None:
        os.makedirs(staged, mode=0o700, exist_ok=True)
        marks = Marks(staged)
        if holder is None:
            marks.let_go()
        else:
            marks.hold(check_name(holder, "holder"))
        value = self._described(layer, parent, image, host_key)
        write_meta(staged, replace(value, slots=slots_of(upper)))

    # --- looking up ------------------------------------------------------------------------------------

    def get(self, layer: str) -> Layer:
        """Return a layer. Raises ``LayerError`` when it, or a layer below it, is missing."""
        with self._lock.shared():
            return self._get(layer)

    def list(self) -> tuple[Layer, ...]:
        """Return every layer whose record, and all records below it, can be read, oldest first."""
        with self._lock.shared():
            found = [layer for name in self._ids() if (layer := self._intact(name)) is not None]
        return tuple(sorted(found, key=lambda layer: layer.created_ms))

    def _intact(self, layer: str) -> Layer | None:
        try:
            return self._get(layer)
        except LayerError:
            return None

    def chain(self, layer: str) -> tuple[Layer, ...]:
        """Return the layer and the layers below it, topmost first."""
        with self._lock.shared():
            return self._chain(layer)

    def compose(self, rootfs: Rootfs, layer: str | None) -> Rootfs:
        """Return the image's root filesystem with the layer's chain on top.

        The caller holds the layer first, and writes the session's ``spec.json`` within ``RETIRED_GRACE_MS``.
        """
        if rootfs.flavour != self.flavour:
            raise LayerError(
                f"image {rootfs.image} is of flavour {rootfs.flavour}, this store of {self.flavour}",
                layer=layer,
            )
        chain = self.chain(layer) if layer is not None else ()
        names = {slot.name for slot in rootfs.slots}
        for link in chain:
            if link.flavour != rootfs.flavour:
                raise LayerError(
                    f"layer {link.id} is of flavour {link.flavour}, the root filesystem of {rootfs.flavour}",
                    layer=link.id,
                )
            self._require_files(link)
            if not set(link.slots) <= names:
                missing = ", ".join(sorted(set(link.slots) - names))
                raise LayerError(
                    f"image {rootfs.image} has no slot {missing} for layer {link.id}", layer=link.id
                )
        slots = tuple(
            replace(
                slot,
                lowers=(
                    *(Lower(self._slot(link, slot.name)) for link in chain if slot.name in link.slots),
                    *slot.lowers,
                ),
            )
            for slot in rootfs.slots
        )
        if max((len(slot.lowers) for slot in slots), default=0) > MOST_LAYERS:
            raise LayerError(
                f"the chain of layer {layer} is longer than the kernel can mount",
                layer=layer,
                hint="fold it",
            )
        return replace(rootfs, slots=slots)

    def _require_files(self, layer: Layer) -> None:
        for slot in layer.slots:
            if not os.path.isdir(self._slot(layer, slot)):
                raise damaged(layer.id, f"is damaged: its directory {layer.directory}/{slot} is gone")

    # --- references ------------------------------------------------------------------------------------

    def hold(self, layer: str, holder: str) -> None:
        """Keep a layer for ``holder``; a second call changes nothing."""
        check_name(holder, "holder")
        with self._lock.exclusive():
            self._get(layer)
            self._marks(layer).hold(holder)

    def release(self, layer: str, holder: str) -> None:
        """End a hold. A missing hold or layer is not an error; only ``collect`` deletes layers."""
        check_name(holder, "holder")
        with self._lock.exclusive():
            if os.path.isdir(self._path(check_name(layer, "layer"))):
                self._marks(layer).release(holder)

    def release_all(self, holder: str) -> None:
        """End every hold of ``holder``."""
        check_name(holder, "holder")
        with self._lock.exclusive():
            for layer in self._ids():
                if holder in self._marks(layer).holders():
                    self._marks(layer).release(holder)

    def holders(self, layer: str) -> tuple[str, ...]:
        with self._lock.shared():
            self._get(layer)
            return self._marks(layer).holders()

    def all_holders(self) -> dict[str, tuple[str, ...]]:
        """Return the holders of each layer, damaged layers included."""
        with self._lock.shared():
            return {layer: self._marks(layer).holders() for layer in self._ids()}

    def restore_holds(self, holds: Mapping[str, str]) -> _Names:
        """Restore missing references, given as holder to layer; return the layers that had lost one."""
        with self._lock.exclusive():
            present = set(self._ids())
            return [
                layer
                for holder, layer in holds.items()
                if layer in present and is_name(holder) and self._marks(layer).restore(holder)
            ]

    def doubt(self, layer: str, holder: str, *, keep_ms: int) -> Doubt:
        """End a reference whose holder is unknown, ``keep_ms`` after the first call for it."""
        check_name(holder, "holder")
        with self._lock.exclusive():
            if check_name(layer, "layer") not in self._ids():
                return Doubt(first=False, ended=True)
            return Doubt(*self._marks(layer).doubt(holder, keep_ms=keep_ms, now_ms=_now_ms()))

    def collect(self) -> _Names:
        """Delete every layer that nothing needs, and finish interrupted deletions."""
        return list(self.sweep().deleted)

    def sweep(self, *, parents: Mapping[str, str | None] | None = None, keep_ms: int = KEPT_MS) -> Swept:
        """Do as ``collect`` does, and report what was found.

        ``parents`` gives the parents of layers whose own record is damaged or gone. ``keep_ms`` is how long a
        layer that has lost its references is set aside.
        """
        with self._lock.exclusive():
            names = self._ids()
            layers = {layer: value for layer in names if (value := self._readable(layer)) is not None}
            below = Below(layers, parents or {})
            needs = session_layers(self._sessions, self._root)
            in_use = below.reach(set().union(*needs.layers.values()))
            needed, set_aside = self._needed(names, below, keep_ms)
            unknown = (*needs.unknown, *sorted(below.unknown))
            if not unknown:
                for layer in layers.keys() - in_use:
                    layers[layer] = self._drop_retired(layers[layer])
                needed, set_aside = self._needed(names, below, keep_ms)
            doomed = [] if unknown else [layer for layer in names if layer not in needed | in_use]
            expired = tuple(layer for layer in doomed if not self._marks(layer).released)
            for layer in doomed:
                os.rename(self._path(layer), self._free(f".del-{layer}"))
            fresh = [layer for layer in set_aside if layer not in in_use and self._marks(layer).set_aside()]
        self._finish_deletions()
        return Swept(tuple(doomed), expired, tuple(fresh), unknown)

    def _needed(self, names: _Names, below: Below, keep_ms: int) -> tuple[set[str], _Names]:
        """Return the layers that holders need, with those set aside, and the latter again on their own."""
        held = below.reach(layer for layer in names if self._marks(layer).holders())
        set_aside = [
            layer
            for layer in names
            if layer not in held and not self._marks(layer).may_go(keep_ms=keep_ms, now_ms=_now_ms())
        ]
        return held | below.reach(set_aside), set_aside

    def _readable(self, layer: str) -> Layer | None:
        try:
            return self._read(layer)
        except LayerError:
            return None

    def _drop_retired(self, layer: Layer) -> Layer:
        limit = _now_ms() - RETIRED_GRACE_MS
        kept = tuple(retired for retired in layer.retired if retired.retired_ms > limit)
        for retired in set(layer.retired) - set(kept):
            self._doom(os.path.join(self._path(layer.id), retired.directory), f".del-{layer.id}")
        if kept == layer.retired:
            return layer
        layer = replace(layer, retired=kept)
        write_meta(self._path(layer.id), layer)
        return layer

    # --- size and durability ---------------------------------------------------------------------------

    def measure(self, layer: str) -> int:
        """Return the bytes the layer takes on disk, and record them. A file with many names counts once."""
        found = self.get(layer)
        size = disk_usage(os.path.join(self._path(layer), found.directory))
        self._update(layer, lambda current: replace(current, size_bytes=size))
        return size

    def sync(self, layer: str) -> Layer:
        """Make a layer and everything below it safe against power loss, and record when that was done."""
        unsynced = [link.id for link in self.chain(layer) if link.synced_ms is None]
        if unsynced:
            _sync_filesystem(self._path(layer))
            moment = _now_ms()
            for link in reversed(unsynced):
                self._update(link, lambda current: replace(current, synced_ms=moment))
        return self.get(layer)

    def _update(self, layer: str, change: Callable[[Layer], Layer]) -> None:
        with self._lock.exclusive():
            write_meta(self._path(layer), change(self._require(layer)))

    # --- folding ---------------------------------------------------------------------------------------

    def fold_to_depth(self, tip: str, *, rootfs: Rootfs, max_depth: int = 30) -> Layer:
        """Fold the top of a chain longer than ``max_depth`` so that half of that depth is left.

        ``rootfs`` is the image's, without layers: it decides whether a whiteout still hides something.
        """
        depth = self.get(tip).depth
        if depth <= max(max_depth, 1):
            return self.get(tip)
        return self.fold(tip, rootfs=rootfs, count=depth - max(max_depth // 2, 1) + 1)

    def fold(self, layer: str, *, rootfs: Rootfs, count: int = 2) -> Layer:
        """Merge a layer with the ``count - 1`` below it into a new directory of the same layer.

        Existing directories are not changed, so it does not matter which sessions hold or mount them, and a
        crash at any point leaves either the old chain or the new one. Files are hard links, so no data is
        copied. The switch is one replacement of ``meta.json``, after the new directory is synced. The
        directories that the fold has replaced stay on record until no session can be using them; then
        ``collect`` deletes them.
        """
        if count < 2:
            raise InvalidRequest("a fold takes at least two layers", field="count")
        with self._fold_lock.exclusive():
            with self._lock.exclusive():
                chain = self._chain(layer)
                if len(chain) < count:
                    raise InvalidRequest(f"layer {layer} has only {len(chain)} to fold", field="count")
                self._marks(layer).hold_for_fold()
            try:
                return self._fold(chain[:count], chain[count:], rootfs)
            finally:
                with self._lock.exclusive():
                    self._marks(layer).release_from_fold()

    def _fold(self, merged: tuple[Layer, ...], below: tuple[Layer, ...], rootfs: Rootfs) -> Layer:
        top = merged[0]
        staged = self._path(f".fold-{top.id}")
        remove_tree(staged)
        lowers = self.compose(rootfs, below[0].id if below else None)
        slots = sorted({slot for link in merged for slot in link.slots})
        if not set(slots) <= {slot.name for slot in lowers.slots}:
            raise LayerError(f"image {rootfs.image} lacks slots of layer {top.id}", layer=top.id)
        for slot in lowers.slots:
            if slot.name in slots:
                merge(
                    [self._slot(link, slot.name) for link in merged if slot.name in link.slots],
                    below=[lower.path for lower in slot.lowers],
                    dest=os.path.join(staged, "fs", slot.name),
                    scratch=os.path.join(staged, "empty"),
                    flavour=self.flavour,
                    way=self._way,
                )
        _sync_filesystem(staged)
        retired = Retired(top.directory, top.parent, _now_ms())
        directory = f"fs.{len(top.retired) + 1}.{retired.retired_ms}"
        with self._lock.exclusive():
            current = self._require(top.id)
            os.rename(os.path.join(staged, "fs"), os.path.join(self._path(top.id), directory))
            folded = replace(
                current,
                parent=below[0].id if below else None,
                directory=directory,
                slots=tuple(slots),
                synced_ms=_now_ms(),
                size_bytes=None,
                retired=(*current.retired, retired),
            )
            write_meta(self._path(top.id), folded)
            _sync_filesystem(self._path(top.id))
        remove_tree(staged)
        return self.get(top.id)

    # --- recovery --------------------------------------------------------------------------------------

    def recover(self) -> Recovered:
        """Finish or undo interrupted work after a crash; harmless at any other time.

        A torn publish is finished if the upper had been moved, else undone: ``lost`` then names its session.
        """
        published: _Names = []
        damaged: _Names = []
        with self._fold_lock.exclusive(), self._lock.exclusive():
            for name in self._hidden():
                try:
                    published += self._settle(name)
                except OSError:
                    continue  # not a file of the store; it stays where it is
            for layer in self._ids():
                self._marks(layer).release_from_fold()
                try:
                    repair.restore(self._path(layer), layer)
                    self._get(layer)
                    self._forget_unnamed(self._require(layer))
                except (LayerError, OSError):
                    damaged.append(layer)
            lost = lost_sessions(self._sessions)
            finished = tuple(self._get(layer) for layer in published if layer not in damaged)
        self._finish_deletions()
        return Recovered(finished, lost, tuple(damaged))

    def _settle(self, name: str) -> _Names:
        """Finish or undo work that a crash interrupted; return the layer this has made, if any."""
        kind, _, layer = name[1:].partition("-")
        torn = self._path(name)
        complete = {"new": "fs", "copy": META}.get(kind)
        if complete is not None and os.path.lexists(os.path.join(torn, complete)):
            os.rename(torn, self._path(layer))
            return [layer]
        if kind in ("new", "fold") or (kind == "copy" and not is_locked(os.path.join(torn, "fs"))):
            os.rename(torn, self._free(f".del-{layer}"))
        return []

    def examine(self) -> Examined:
        """Return which layers are damaged, and the parent of each layer."""
        with self._lock.shared():
            return repair.examine(self._root, self._ids())

    def repair(
        self, layer: str, *, parent: str | None, image: str, host_key: str | None, created_ms: int
    ) -> bool:
        """Restore the record of a damaged layer from what the caller knows; return whether it was damaged."""
        with self._lock.exclusive():
            known = replace(self._described(layer, parent, image, host_key), created_ms=created_ms)
            return repair.rebuild(self._path(check_name(layer, "layer")), known)

    def _forget_unnamed(self, layer: Layer) -> None:
        """Delete a directory that a fold moved into a layer just before the worker died."""
        self._require_files(layer)  # if these are gone, the other directory may be the only copy
        named = {layer.directory, *(retired.directory for retired in layer.retired)}
        for name in os.listdir(self._path(layer.id)):
            if name.startswith("fs") and name not in named:
                self._doom(os.path.join(self._path(layer.id), name), f".del-{layer.id}")

    def _finish_deletions(self) -> None:
        for name in self._hidden():
            if name.startswith(".del-"):
                remove_tree(self._path(name))

    # --- below the lock --------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name)

    def _slot(self, layer: Layer, slot: str) -> str:
        return os.path.join(self._root, layer.id, layer.directory, slot)

    def _ids(self) -> _Names:
        with os.scandir(self._root) as entries:
            return sorted(
                entry.name for entry in entries if is_name(entry.name) and entry.is_dir(follow_symlinks=False)
            )

    def _hidden(self) -> _Names:
        return sorted(name for name in os.listdir(self._root) if name.startswith(".") and "-" in name)

    def _read(self, layer: str) -> Layer | None:
        return read_meta(self._path(check_name(layer, "layer")), layer)

    def _require(self, layer: str) -> Layer:
        found = self._read(layer)
        if found is None:
            raise damaged(layer, "is missing")
        return found

    def _walk(self, layer: str) -> Iterator[Layer]:
        seen: set[str] = set()
        at: str | None = layer
        above: str | None = None
        while at is not None:
            if at in seen:
                raise LayerError(f"layer {at} is its own ancestor", layer=at)
            seen.add(at)
            found = self._read(at)
            if found is None:
                needed = f", which {above} stands on," if above else ""
                raise LayerError(f"layer {at}{needed} is missing", layer=at, hint=REPAIR_HINT)
            yield found
            above, at = at, found.parent

    def _chain(self, layer: str) -> tuple[Layer, ...]:
        links = list(self._walk(layer))
        return tuple(replace(link, depth=len(links) - index) for index, link in enumerate(links))

    def _get(self, layer: str) -> Layer:
        return self._chain(layer)[0]

    def _marks(self, layer: str) -> Marks:
        return Marks(self._path(layer))

    def _doom(self, path: str, name: str) -> None:
        try:
            os.rename(path, self._free(name))
        except FileNotFoundError:
            pass

    def _free(self, name: str) -> str:
        """Return an unused path for ``name``: an earlier deletion of the same name may still be running."""
        path, number = self._path(name), 0
        while os.path.lexists(path):
            number += 1
            path = self._path(f"{name}.{number}")
        return path


def _sync_filesystem(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        syncfs(fd)
    finally:
        os.close(fd)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
