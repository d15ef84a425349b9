"""Read an image's merged layers before any session has mounted them.

This is a detached read-only overlay (for one layer, the directory itself), read with
``openat2(RESOLVE_IN_ROOT)``: the image's own links are followed inside the image, and none can lead outside.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from types import TracebackType

from sandkeep.host.rootfs import Flavour
from sandkeep.linux import overlay
from sandkeep.linux import syscalls as sc
from sandkeep.linux.overlay import Way

_MOST_LINKS = 40


class View:
    def __init__(self, layers: Sequence[str], *, flavour: Flavour, way: Way) -> None:
        """Mount ``layers``, directories with the topmost first; ``way`` is how to mount them."""
        if len(layers) == 1:
            self._root = os.open(layers[0], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        else:
            self._root = overlay.read_only(layers, ["userxattr"] if flavour == "user" else [], way)

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._root)

    def stat(self, path: str, *, follow: bool = True) -> os.stat_result | None:
        try:
            fd = sc.openat2(self._root, path, os.O_PATH | (0 if follow else os.O_NOFOLLOW))
        except OSError:
            return None
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def is_program(self, path: str) -> bool:
        info = self.stat(path)
        return info is not None and stat.S_ISREG(info.st_mode) and bool(info.st_mode & 0o111)

    def is_directory(self, path: str) -> bool:
        info = self.stat(path)
        return info is not None and stat.S_ISDIR(info.st_mode)

    def read(self, path: str) -> bytes | None:
        try:
            fd = sc.openat2(self._root, path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return None
        with open(fd, "rb") as source:
            return source.read()

    def text(self, path: str) -> str:
        return (self.read(path) or b"").decode("utf-8", errors="surrogateescape")

    def resolve(self, path: str) -> str:
        """Return the real path of ``path``, following the image's links; missing parts stay as written."""
        done: list[str] = []
        todo = [part for part in path.split("/") if part not in ("", ".")]
        links = 0
        while todo:
            part = todo.pop(0)
            if part == "..":
                done = done[:-1]
                continue
            here = "/".join([*done, part])
            target = self._link(here)
            if target is None or links >= _MOST_LINKS:
                done.append(part)
                continue
            links += 1
            if target.startswith("/"):
                done = []
            todo = [part for part in target.split("/") if part not in ("", ".")] + todo
        return "/".join(done)

    def _link(self, path: str) -> str | None:
        try:
            fd = sc.openat2(self._root, path, os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            return os.readlink("", dir_fd=fd) if stat.S_ISLNK(os.fstat(fd).st_mode) else None
        finally:
            os.close(fd)
