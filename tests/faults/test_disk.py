"""A full disk: the session that filled it ends as such, nothing logged is lost, the others go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandkeep.host.driver import Limits
from sandkeep.linux import syscalls
from sandkeep.shared.outputlog import Chunk, Item
from tests.conftest import IS_ROOT, User
from tests.driver_lab import Lab
from tests.faults.watching import eventually
from tests.mode_runner import MODES

_SIZE = 256 << 20


@pytest.fixture(scope="module", params=MODES)
def small(request: pytest.FixtureRequest, test_area: Path) -> Iterator[tuple[str, User | None]]:
    """A data directory on a small file system of its own, and who uses it."""
    if not IS_ROOT:
        pytest.skip("needs real root: it mounts a small file system")
    place = test_area / f"small-{request.param}"
    place.mkdir()
    user: User | None = None
    if request.param != "root":
        user = request.getfixturevalue("ordinary_user" if request.param == "subuid" else "single_user")
    owner = f",uid={user.uid},gid={user.gid}" if user else ""
    syscalls.mount("tmpfs", str(place), "tmpfs", 0, f"size={_SIZE},mode=0755{owner}")
    try:
        yield str(place / "data"), user
    finally:
        syscalls.umount2(str(place), syscalls.MNT_DETACH)
        place.rmdir()


@contextmanager
def _no_room(data_dir: str) -> Iterator[None]:
    """Not one page is free on the file system of the data directory."""
    with open(f"{data_dir}/ballast", "wb", buffering=0) as ballast:
        for size in (1 << 20, 4096):
            try:
                while ballast.write(b"\1" * size):
                    pass
            except OSError:
                continue
        yield
    os.unlink(f"{data_dir}/ballast")


def _size(items: list[Item]) -> int:
    return sum(len(item.data) for item in items if isinstance(item, Chunk))


def _ask(small: tuple[str, User | None], body: Callable[[str], None]) -> None:
    data_dir, user = small
    if user is None:
        body(data_dir)
    else:
        user.call(body, data_dir)


def _free(path: str) -> int:
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def _fill_the_disk(data_dir: str) -> None:
    with Lab(data_dir) as lab:
        other = lab.box(name="other")
        other.sh("echo mine > file")
        ticking = other.start("bash", "-c", "while sleep 0.1; do :; done")
        box = lab.box(name="filler")
        box.sh("echo kept > before")
        script = "echo filling; read; cat /dev/zero > big; echo status $?; sleep 600"
        process = box.start("bash", "-c", script, stdin=True)
        eventually(lambda: box.output(process))  # logged while there is room
        lab.do(lab.driver.write_stdin(box.ref, process, b"\n"))
        final = lab.do(lab.driver.wait_stopped(box.ref))
        assert final.status == "stopped"
        assert final.reason is not None and final.reason.startswith("disk full")
        assert box.state().reason == final.reason
        record = lab.do(lab.driver.process(box.ref, process))
        assert record.status == "lost"
        assert box.finish(process).stdout.startswith("filling\n")

        assert other.state().status == "running"
        assert lab.do(lab.driver.process(other.ref, ticking)).status == "running"
        lab.do(lab.driver.forget(box.ref))
        lab.do(lab.storage.discard_session("filler"))
        assert _free(data_dir) > _SIZE // 4
        assert other.sh("cat file; echo more > more; cat more").stdout == "mine\nmore\n"


def test_a_disk_filler_ends_as_disk_full(small: tuple[str, User | None]) -> None:
    """The session is stopped for that reason; others live, and without its files all is well."""
    _ask(small, _fill_the_disk)


def _fill_the_log(data_dir: str) -> None:
    with Lab(data_dir) as lab:
        box = lab.box(name="talker")
        script = "for i in $(seq 1 200); do printf '%0999d\\n' $i; [ $i = 1 ] && read; sleep 0.01; done"
        talker = box.start("bash", "-c", script, stdin=True)
        eventually(lambda: box.output(talker))
        with _no_room(data_dir):
            logged = _size(box.output(talker))
            lab.do(lab.driver.write_stdin(box.ref, talker, b"\n"))
            # Long enough for many attempts to write, and for the process to end while there is no room.
            time.sleep(3.0)
            assert logged <= _size(box.output(talker)) < 200_000, "the disk was not full after all"
            assert box.state().status == "running"
        result = box.finish(talker)
        assert result.stdout == "".join(f"{i:0999d}\n" for i in range(1, 201))
        assert (result.record.status, result.code) == ("exited", 0)
        assert box.sh("echo alive").stdout == "alive\n"


def test_a_full_disk_loses_no_output_and_no_session(small: tuple[str, User | None]) -> None:
    """The log cannot be written for seconds: every byte is there afterwards."""
    _ask(small, _fill_the_log)


def _stop_when_full(data_dir: str) -> None:
    with Lab(data_dir) as lab:
        box = lab.box(name="stuck")
        box.sh("echo kept > file")
        process = box.start("bash", "-c", "echo begun; sleep 600")
        eventually(lambda: box.output(process))
        with _no_room(data_dir):
            final = box.stop()
            assert (final.status, final.reason) == ("stopped", "test")
            assert box.state().status == "stopped"
            assert lab.do(lab.driver.process(box.ref, process)).status == "lost"
        lab.do(lab.driver.forget(box.ref))
        box.publish("kept")
        heir = lab.box(layer="kept")
        assert heir.sh("cat file").stdout == "kept\n"
        heir.remove()


def test_a_session_can_be_stopped_when_the_disk_is_full(small: tuple[str, User | None]) -> None:
    """Stopping needs no room: the final state is on disk, and the files can be published."""
    _ask(small, _stop_when_full)


def _over_quota(data_dir: str) -> None:
    with Lab(data_dir) as lab:
        box = lab.box(name="greedy", limits=Limits(disk_bytes=20 << 20))
        assert box.created.limits["disk"].state == "watched"
        box.start("bash", "-c", "head -c 60M /dev/zero > big; sleep 600")
        final = lab.do(lab.driver.wait_stopped(box.ref))
        assert final.reason is not None and final.reason.startswith("disk full")
        assert f"{20 << 20} allowed" in final.reason


def test_a_session_over_its_own_disk_limit_is_stopped(small: tuple[str, User | None]) -> None:
    _ask(small, _over_quota)
