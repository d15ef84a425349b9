"""A session that starts on a full disk: it starts whole, or fails as what it is and leaves nothing."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import pytest

from sandkeep.errors import NoSpace
from sandkeep.host.native import mounts, ways
from sandkeep.linux import syscalls
from sandkeep.linux.overlay import WAYS, Way
from tests.conftest import IS_ROOT, User
from tests.driver_lab import Box, Lab
from tests.host.overlay_mounts import run_forked
from tests.mode_runner import MODES

_BLOCK = 4096
_INODES = 2048
_CASES = [*MODES, "root/names"]


@pytest.fixture(params=_CASES)
def small(request: pytest.FixtureRequest, test_area: Path) -> Iterator[tuple[str, str, User | None]]:
    """A data directory on a small ext4, how overlays are mounted there, and who uses it."""
    if not IS_ROOT:
        pytest.skip("needs real root: it mounts a small file system")
    mode, _, way = request.param.partition("/")
    image, place = test_area / "small.img", test_area / "small"
    with image.open("wb") as file:
        file.truncate(48 << 20)
    made = ["mkfs.ext4", "-q", "-F", "-b", str(_BLOCK), "-m", "0", "-N", str(_INODES), "-O", "^has_journal"]
    subprocess.run([*made, str(image)], check=True)
    place.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    user: User | None = None
    if mode != "root":
        user = request.getfixturevalue("ordinary_user" if mode == "subuid" else "single_user")
        os.chown(place, user.uid, user.gid)
    try:
        yield str(place / "data"), way, user
    finally:
        syscalls.umount2(str(place), syscalls.MNT_DETACH)
        place.rmdir()
        image.unlink()


class _Blocks:
    """Uses every block of a file system, and gives back some."""

    def __init__(self, place: str) -> None:
        self._path = f"{place}/ballast"
        self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 - open for as long as we live
        self._end = 0
        for step in (1 << 24, 1 << 20, _BLOCK * 16, _BLOCK):
            try:
                while True:
                    os.posix_fallocate(self._file.fileno(), self._end, step)
                    self._end += step
            except OSError as error:
                assert error.errno == errno.ENOSPC

    def leave(self, left: int) -> None:
        """Have so many free blocks in all; more than before."""
        self._file.truncate(self._end - left * _BLOCK)

    def remove(self) -> None:
        self._file.close()
        os.unlink(self._path)


class _Inodes:
    """The same with files."""

    def __init__(self, place: str) -> None:
        self._place = f"{place}/many"
        self._left = 0
        os.mkdir(self._place)
        number = 0
        try:
            while True:
                os.close(os.open(f"{self._place}/{number}", os.O_CREAT | os.O_CLOEXEC))
                number += 1
        except OSError as error:
            assert error.errno == errno.ENOSPC

    def leave(self, left: int) -> None:
        for freed in range(self._left, left):
            os.unlink(f"{self._place}/{freed}")
        self._left = left

    def remove(self) -> None:
        for each in os.listdir(self._place):
            os.unlink(f"{self._place}/{each}")
        os.rmdir(self._place)


def _is_writable(box: Box) -> None:
    # No process: what it prints, and its end, would wait for room.
    with suppress(NoSpace):
        box.files("mkdir", path="/srv/x", user="root")


def _tiny(lab: Lab) -> str:
    """An image of a few directories: one of the host's would be most of the disk."""
    source = f"{os.environ['TMPDIR']}/tiny"
    os.makedirs(f"{source}/srv")
    lab.do(lab.storage.import_image(source, kind="directory", name="tiny"))
    shutil.rmtree(source)
    return "tiny"


def _start_with_little(data_dir: str, way: str, kind: str, layer: str | None) -> dict[str, int]:
    """Start sessions with more and more room; how many did and did not."""
    outcomes = {"started": 0, "no space": 0}
    with Lab(data_dir, way=cast("Way | None", way or None)) as lab:
        image = _tiny(lab)
        first = lab.box(name="first", image=image)
        first.files("mkdir", path="/srv/kept", user="root")
        first.stop()
        lab.do(lab.driver.forget(first.ref))
        first.publish("kept")
        first.remove()
        filling: _Blocks | _Inodes = _Blocks(data_dir) if kind == "blocks" else _Inodes(data_dir)
        for left in (*range(16), *range(16, 64, 6)):
            filling.leave(left)
            try:
                box = lab.box(name=f"try-{left}", image=image, layer=layer)
            except NoSpace:
                outcomes["no space"] += 1
                assert os.listdir(f"{data_dir}/sessions") == []
                continue
            outcomes["started"] += 1
            _is_writable(box)
            box.remove()
        filling.remove()
    return outcomes


def _ask(small: tuple[str, str, User | None], body: Callable[..., dict[str, int]], *args: str | None) -> None:
    data_dir, way, user = small
    outcomes = body(data_dir, way, *args) if user is None else user.call(body, data_dir, way, *args)
    assert outcomes["no space"] and outcomes["started"], outcomes


@pytest.mark.parametrize("kind", ["blocks", "inodes"])
@pytest.mark.parametrize("layer", [None, "kept"], ids=["create", "resume"])
def test_a_session_on_a_full_disk_is_whole_or_is_not_there(
    small: tuple[str, str, User | None], kind: str, layer: str | None
) -> None:
    """Whatever room is left: a start that fails is ``NoSpace``, and one that succeeds can write."""
    _ask(small, _start_with_little, kind, layer)


# --- never read-only without a word ---------------------------------------------------------------------


def _mount_on(place: str, way: Way, idmapped: bool) -> None:
    """Mount one slot there, whose directories exist."""
    made: list[int] = []
    with ExitStack() as held:
        userns = held.enter_context(ways.trial_namespace()) if idmapped else -1
        base = ways.TRIAL_BASE if idmapped else 0
        syscalls.prctl(syscalls.PR_SET_SECUREBITS, syscalls.SECBIT_NO_SETUID_FIXUP)
        builder = mounts.Builder(place, userns=userns, base=base, way=way, anchor=f"{place}/anchor")
        held.callback(builder.close)
        slot = mounts.SlotPlan([(f"{place}/lower", True)], f"{place}/fs", f"{place}/work")
        builder.overlays([slot], made, flavour="trusted")
    for fd in made:
        assert not os.fstatvfs(fd).f_flag & os.ST_RDONLY
        os.close(fd)


@pytest.fixture
def place(small: tuple[str, str, User | None]) -> str:
    directory, forced, user = small
    if user is not None or forced:
        pytest.skip("how the kernel mounts is the same for everybody")
    for name in ("lower", "fs", "work", "anchor"):
        os.makedirs(f"{directory}/{name}")
    return directory


@pytest.mark.parametrize("idmapped", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_overlay_that_the_kernel_mounts_read_only_for_want_of_room_is_refused(
    place: str, way: Way, idmapped: bool
) -> None:
    def full() -> None:
        filling = _Blocks(place)
        with pytest.raises(OSError, match="No space left"):
            _mount_on(place, way, idmapped)
        filling.remove()
        _mount_on(place, way, idmapped)

    run_forked(full)


@pytest.mark.parametrize("idmapped", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_overlay_that_the_kernel_mounts_read_only_for_another_reason_is_refused(
    place: str, way: Way, idmapped: bool
) -> None:
    def closed() -> None:
        subprocess.run(["chattr", "+i", f"{place}/work"], check=True)
        try:
            with pytest.raises(PermissionError, match="work directory"):
                _mount_on(place, way, idmapped)
        finally:
            subprocess.run(["chattr", "-i", f"{place}/work"], check=True)
        _mount_on(place, way, idmapped)

    run_forked(closed)
