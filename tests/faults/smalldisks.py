"""Real file systems in files, small enough to be filled, with a server on them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sandkeep.embedded import READY
from sandkeep.linux import syscalls
from tests.conftest import IS_ROOT, User
from tests.server.server_process import PROJECT, TEAM, ServerProcess


class Kind(NamedTuple):
    """How a disk is made, and what of it is used up."""

    name: str
    make: tuple[str, ...]
    megabytes: int
    inodes: bool = False
    ordinary: bool = False
    """The server is an ordinary user's."""


EXT4 = Kind("ext4", ("mkfs.ext4", "-q", "-F"), 768)
EXT4_INODES = Kind("ext4-inodes", ("mkfs.ext4", "-q", "-F", "-N", "16000"), 768, inodes=True)
EXT4_ORDINARY = Kind("ext4-ordinary", ("mkfs.ext4", "-q", "-F", "-m", "0"), 768, ordinary=True)
"""With no blocks for root alone: the filler is root and would take those, too."""
BTRFS = Kind("btrfs", ("mkfs.btrfs", "-q", "-f"), 1024)
XFS = Kind("xfs", ("mkfs.xfs", "-q", "-f"), 768)


@contextmanager
def small_disk(kind: Kind, area: Path) -> Iterator[Path]:
    """An empty file system mounted below ``area``."""
    if not IS_ROOT:
        pytest.skip("needs real root: it mounts a small file system")
    if shutil.which(kind.make[0]) is None:
        pytest.skip(f"{kind.make[0]} is not installed")
    image, place = area / f"{kind.name}.img", area / kind.name
    with open(image, "wb") as out:
        out.truncate(kind.megabytes << 20)
    subprocess.run([*kind.make, str(image)], check=True, capture_output=True)
    place.mkdir()
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(place)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"{kind.name} cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        syscalls.umount2(str(place), syscalls.MNT_DETACH)
        place.rmdir()
        image.unlink()


class Filler:
    """Uses up what is left of a disk, and gives it back."""

    def __init__(self, place: Path, *, inodes: bool) -> None:
        self._place = place / "filler"
        self._inodes = inodes

    def fill(self) -> None:
        self._place.mkdir(exist_ok=True)
        if self._inodes:
            self._take_inodes()
        else:
            self._take_bytes()

    def _take_bytes(self) -> None:
        with open(self._place / "bytes", "ab", buffering=0) as out:
            for size in (1 << 20, 64 << 10, 4096):
                try:
                    while out.write(b"\1" * size):
                        pass
                except OSError:
                    continue
            try:
                os.fsync(out.fileno())
            except OSError:
                pass  # what was not written after all is free, and is taken the next time

    def _take_inodes(self) -> None:
        number = len(list(self._place.iterdir()))
        try:
            while True:
                (self._place / f"inode-{number}").touch(exist_ok=False)
                number += 1
        except OSError:
            pass

    def free(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)


class ServerOnDisk(ServerProcess):
    """A server whose log and whose word that it is ready need no room on its own disk."""

    _who: dict[str, Any]

    def __init__(self, data: Path, log: Path, user: User | None = None) -> None:
        data.mkdir(mode=0o700)
        super().__init__(data)
        self._log = log
        self._interpreter, self._who = sys.executable, {}
        if user is not None:
            os.chown(data, user.uid, user.gid)
            self._interpreter = user.interpreter
            self._who = {
                "user": user.uid,
                "group": user.gid,
                "extra_groups": [],
                "env": user.environment(),
                "cwd": user.home,
            }

    def start(self, *arguments: str) -> None:
        heard, told = os.pipe()
        command = [self._interpreter, "-X", "faulthandler", "-m", "sandkeep", "serve"]
        command += ["--data-dir", str(self.data), "--ready-fd", str(told)]
        command += ["--port", self.url.rpartition(":")[2] or "0", *arguments]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, pass_fds=(told,), **self._who
            )
        os.close(told)
        with os.fdopen(heard, "rb") as ready:
            said = ready.read()
        assert said == READY, f"the server did not start: {said!r}\n{self.log()}"
        if not self.url:
            self.url = json.loads((self.data / "server.json").read_text())["url"]
        if not self.token:
            self.token = self.make_token("--jwt")

    def log(self) -> str:
        return self._log.read_text()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _projects(self) -> list[tuple[str, str]]:
        return [(TEAM, PROJECT)]  # the server may be the only one who can read its store

    def end(self) -> None:
        """Leave no process behind, however the test went."""
        if not self.alive:
            self.start()
        self.clear()
