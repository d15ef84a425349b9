"""Mounts made outside the session: the overlay slots, the device tree, binds.

Init gets only detached mounts, by descriptor: no path of the host shows inside, and nothing has to be cleaned
up. Under root they are idmapped to the session. In a user namespace id mapping is not available and not
needed, because ids on disk are already the namespace's own.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from sandkeep.host.native.inside import DEVICE_DIRECTORIES, DEVICE_LINKS, DEVICES
from sandkeep.linux import overlay, syscalls
from sandkeep.linux.overlay import Stack, Way
from sandkeep.linux.syscalls import (
    AT_EMPTY_PATH,
    MOUNT_ATTR_IDMAP,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    OPEN_TREE_CLOEXEC,
    OPEN_TREE_CLONE,
)

_FEW: Final = 16
"""A disk with fewer free blocks or files counts as full when an overlay is mounted."""
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class SlotPlan(NamedTuple):
    """One overlay of a session. Each lower comes with whether it is in the data directory; topmost first."""

    lowers: list[tuple[str, bool]]
    upper: str
    work: str
    read_only: bool = False
    volatile: bool = False


def device_tree(owner: int) -> int:
    """Return a detached, read-only /dev for one session, with the usual nodes, made by root.

    Each session has its own: on shared nodes, sessions could take locks and watch each other.
    """
    context = syscalls.fsopen("tmpfs")
    try:
        syscalls.fsconfig_string(context, "mode", "0755")
        syscalls.fsconfig_string(context, "size", "64k")
        syscalls.fsconfig_create(context)
        tree = syscalls.fsmount(context, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC)
    finally:
        os.close(context)
    try:
        for name, major, minor in DEVICES:
            os.mknod(name, 0o020666, os.makedev(major, minor), dir_fd=tree)
            os.chmod(name, 0o666, dir_fd=tree)
        for name in DEVICE_DIRECTORIES:
            os.mkdir(name, 0o755, dir_fd=tree)
        for name, target in DEVICE_LINKS:
            os.symlink(target, name, dir_fd=tree)
        _own_everything(tree, owner)
        syscalls.mount_setattr(tree, attr_set=MOUNT_ATTR_RDONLY)
    except BaseException:
        os.close(tree)
        raise
    return tree


def _own_everything(tree: int, owner: int) -> None:
    links = [name for name, _ in DEVICE_LINKS]
    for name in (".", *(name for name, _, _ in DEVICES), *DEVICE_DIRECTORIES, *links):
        os.chown(name, owner, owner, dir_fd=tree, follow_symlinks=False)


def clone_idmapped(source_fd: int, userns: int, attributes: int = 0) -> int:
    """Return a detached clone of a descriptor's mount, with ids as the user namespace maps them."""
    tree = syscalls.open_tree(b"", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH, source_fd)
    try:
        syscalls.mount_setattr(tree, attr_set=MOUNT_ATTR_IDMAP | attributes, userns_fd=userns)
    except BaseException:
        os.close(tree)
        raise
    return tree


class Builder:
    """Builds the mounts of one session. ``userns`` is the namespace to map ids to, or -1 for none.

    ``anchor`` is a directory of the session's own; overlays that are mounted by path are attached to it.
    """

    def __init__(self, data_dir: str, *, userns: int, base: int, way: Way, anchor: str) -> None:
        self._data_dir = data_dir
        self._userns = userns
        self._base = base
        self._way = way
        self._anchor = anchor
        self._fds: list[int] = []
        self._store = -1

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def overlays(
        self, slots: list[SlotPlan], made: list[int], *, flavour: str, shown: Sequence[str] = ()
    ) -> None:
        """Mount every slot, then every host directory in ``shown``.

        The detached overlays are appended to ``made`` one by one; the caller closes them.
        """

        def build() -> None:
            for slot in slots:
                made.append(self._slot(slot, flavour))
            for path in shown:
                made.append(self._shown(path, flavour))

        self._where_layers_are(build)

    def trial(self, lowers: list[str], *, flavour: str) -> None:
        """Mount and drop a read-only overlay, to test whether this way works here."""

        def build() -> None:
            stack = Stack([self._below_store(path) for path in lowers], _options(flavour))
            os.close(overlay.mount(stack, self._way, self._anchor))

        self._where_layers_are(build)

    # --- layers ------------------------------------------------------------------------------------------

    def _where_layers_are(self, build: Callable[[], None]) -> None:
        if self._way == "descriptors":
            build()
        else:
            overlay.apart(build)

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _attached(self, tree: int) -> int:
        """Attach a tree to the anchor: to be mounted by path, layers must be on attached mounts."""
        if self._way == "names":
            syscalls.move_mount(tree, self._anchor)
        return tree

    def _store_fd(self) -> int:
        # One clone for all layers: a clone per layer costs a tenth of a millisecond each.
        if self._store < 0:
            plain = os.open(self._data_dir, os.O_PATH | os.O_CLOEXEC)
            if self._userns < 0 and self._way == "names":
                self._store = self._keep(plain)
                return plain
            try:
                if self._userns < 0:
                    tree = syscalls.open_tree(b"", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH, plain)
                else:
                    tree = clone_idmapped(plain, self._userns)
            finally:
                os.close(plain)
            self._store = self._attached(self._keep(tree))
        return self._store

    def _below_store(self, path: str) -> int:
        relative = os.path.relpath(path, self._data_dir)
        return self._keep(os.open(relative, _DIRECTORY, dir_fd=self._store_fd()))

    def _host_directory(self, path: str) -> int:
        plain = os.open(path, _DIRECTORY)
        if self._userns < 0:
            return self._keep(plain)
        try:
            return self._attached(self._keep(clone_idmapped(plain, self._userns, MOUNT_ATTR_RDONLY)))
        finally:
            os.close(plain)

    def _slot(self, slot: SlotPlan, flavour: str) -> int:
        lowers = [
            self._below_store(path) if store else self._host_directory(path) for path, store in slot.lowers
        ] or [self._below_store(f"{self._data_dir}/empty")]
        stack = Stack(
            lowers,
            [*_options(flavour), *(["volatile"] if slot.volatile else [])],
            self._below_store(slot.upper),
            self._below_store(slot.work),
            MOUNT_ATTR_NODEV | (MOUNT_ATTR_RDONLY if slot.read_only else 0),
        )
        with self._session_root():
            mounted = overlay.mount(stack, self._way, self._anchor)
            if not slot.read_only and os.fstatvfs(mounted).f_flag & os.ST_RDONLY:
                os.close(mounted)
                raise _why_read_only(stack.work)
            return mounted

    @contextmanager
    def _session_root(self) -> Iterator[None]:
        # An overlay uses the credentials of the process that mounts it. They must be mapped in the idmapped
        # layers, or the kernel cannot make its work directory and silently mounts read-only.
        syscalls.setfsgid(self._base)
        syscalls.setfsuid(self._base)
        try:
            yield
        finally:
            syscalls.setfsuid(0)
            syscalls.setfsgid(0)

    def _shown(self, path: str, flavour: str) -> int:
        """Mount a host directory read-only, as an overlay, so that its files cannot be locked from inside."""
        lowers = [self._host_directory(path), self._below_store(f"{self._data_dir}/empty")]
        attributes = MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID | MOUNT_ATTR_RDONLY
        stack = Stack(lowers, _options(flavour), attributes=attributes)
        with self._session_root():
            return overlay.mount(stack, self._way, self._anchor)


def _why_read_only(work: int) -> OSError:
    """Explain a read-only overlay: the kernel reports no error if it cannot write to the work directory."""
    try:
        os.mkdir("tried", dir_fd=work)
        os.rmdir("tried", dir_fd=work)
    except OSError as error:
        return OSError(error.errno, f"the work directory of the overlay: {error.strerror}")
    # The kernel creates several files there: there may have been room for all but the last.
    disk = os.fstatvfs(work)
    if disk.f_bfree < _FEW or (disk.f_files and disk.f_ffree < _FEW):
        return OSError(errno.ENOSPC, f"the work directory of the overlay: {os.strerror(errno.ENOSPC)}")
    return OSError(errno.EROFS, "the kernel mounted the overlay read-only")


def _options(flavour: str) -> list[str]:
    return ["redirect_dir=on" if flavour == "trusted" else "userxattr", "index=off", "metacopy=off"]
