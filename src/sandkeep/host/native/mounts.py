"""Mounts made from outside: the overlay slots, the device tree, binds. Nothing here enters a namespace.

Under root everything is a detached mount, idmapped to the session, handed to init by descriptor: no path of
the host shows inside, and nothing has to be cleaned up. In a user namespace id mapping is not available and
not needed, because ids on disk are already the namespace's own.
"""

from __future__ import annotations

import os
from typing import Any

from sandkeep.host.native.inside import DEVICE_DIRECTORIES, DEVICE_LINKS, DEVICES
from sandkeep.linux import syscalls
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


def device_template() -> int:
    """A detached, read-only /dev with the usual nodes; made once by root, cloned for every session."""
    context = syscalls.fsopen("tmpfs")
    try:
        syscalls.fsconfig_string(context, "mode", "0755")
        syscalls.fsconfig_string(context, "size", "64k")
        syscalls.fsconfig_create(context)
        tree = syscalls.fsmount(context, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC)
    finally:
        os.close(context)
    for name, major, minor in DEVICES:
        os.mknod(name, 0o020666, os.makedev(major, minor), dir_fd=tree)
        os.chmod(name, 0o666, dir_fd=tree)
    for name in DEVICE_DIRECTORIES:
        os.mkdir(name, 0o755, dir_fd=tree)
    for name, target in DEVICE_LINKS:
        os.symlink(target, name, dir_fd=tree)
    syscalls.mount_setattr(tree, attr_set=MOUNT_ATTR_RDONLY)
    return tree


def clone_idmapped(source_fd: int, userns: int, attributes: int = 0) -> int:
    """A detached clone of what a descriptor shows, with ids as the user namespace maps them."""
    tree = syscalls.open_tree(b"", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH, source_fd)
    try:
        syscalls.mount_setattr(tree, attr_set=MOUNT_ATTR_IDMAP | attributes, userns_fd=userns)
    except BaseException:
        os.close(tree)
        raise
    return tree


class Builder:
    """Builds the mounts of one session. ``userns`` is the namespace to map ids to, or -1 for none."""

    def __init__(self, data_dir: str, *, userns: int, base: int) -> None:
        self._data_dir = data_dir
        self._userns = userns
        self._base = base
        self._fds: list[int] = []
        self._store = -1

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _store_fd(self) -> int:
        # One clone for all layers: a clone per layer costs a tenth of a millisecond each.
        if self._store < 0:
            plain = os.open(self._data_dir, os.O_PATH | os.O_CLOEXEC)
            if self._userns < 0:
                tree = syscalls.open_tree(b"", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH, plain)
                self._store = self._keep(tree)
            else:
                try:
                    self._store = self._keep(clone_idmapped(plain, self._userns))
                finally:
                    os.close(plain)
        return self._store

    def _below_store(self, path: str) -> int:
        relative = os.path.relpath(path, self._data_dir)
        return self._keep(
            os.open(relative, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._store_fd())
        )

    def _host_directory(self, path: str, *, read_only: bool) -> int:
        plain = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if self._userns < 0:
            return self._keep(plain)
        try:
            return self._keep(clone_idmapped(plain, self._userns, MOUNT_ATTR_RDONLY if read_only else 0))
        finally:
            os.close(plain)

    def overlay(self, slot: dict[str, Any], *, flavour: str, upper: str, work: str, volatile: bool) -> int:
        """A detached overlay of one slot; the caller owns the descriptor."""
        lowers = [
            self._below_store(path) if store else self._host_directory(path, read_only=True)
            for path, store in slot["lowers"]
        ] or [self._below_store(f"{self._data_dir}/empty")]
        upper_fd, work_fd = self._below_store(upper), self._below_store(work)
        context = syscalls.fsopen("overlay")
        # The overlay works with the credentials of this moment. They must be mapped in the idmapped layers,
        # or the kernel cannot make its work directory and silently mounts read-only.
        syscalls.setfsgid(self._base)
        syscalls.setfsuid(self._base)
        try:
            for fd in lowers:
                syscalls.fsconfig_fd(context, "lowerdir+", fd)
            syscalls.fsconfig_fd(context, "upperdir", upper_fd)
            syscalls.fsconfig_fd(context, "workdir", work_fd)
            if flavour == "trusted":
                syscalls.fsconfig_string(context, "redirect_dir", "on")
            else:
                syscalls.fsconfig_flag(context, "userxattr")
            syscalls.fsconfig_string(context, "index", "off")
            syscalls.fsconfig_string(context, "metacopy", "off")
            if volatile:
                syscalls.fsconfig_flag(context, "volatile")
            syscalls.fsconfig_create(context)
            read_only = MOUNT_ATTR_RDONLY if slot["read_only"] else 0
            return syscalls.fsmount(context, MOUNT_ATTR_NODEV | read_only)
        finally:
            syscalls.setfsuid(0)
            syscalls.setfsgid(0)
            os.close(context)

    def bind(self, source: str, *, read_only: bool) -> int:
        """A detached clone of a host directory; the caller owns the descriptor."""
        attributes = MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID | (MOUNT_ATTR_RDONLY if read_only else 0)
        plain = os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if self._userns >= 0:
                return clone_idmapped(plain, self._userns, attributes)
            tree = syscalls.open_tree(b"", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH, plain)
            syscalls.mount_setattr(tree, attr_set=attributes)
            return tree
        finally:
            os.close(plain)

    def devices(self, template: int) -> int:
        return clone_idmapped(template, self._userns)
