"""File systems of the host stay the host's: what it unmounts is gone, whatever sandkeep runs meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandkeep.linux import syscalls
from tests.conftest import IS_ROOT, ROOT, User, remove_tree
from tests.mode_runner import MODES
from tests.polling import until

_MS_SHARED = 1 << 20

Sandkeep = Callable[..., str]


@pytest.fixture(params=MODES)
def sandkeep(request: pytest.FixtureRequest, test_area: Path) -> Iterator[Sandkeep]:
    """The command line of root or of an ordinary user, on a data directory of its own."""
    if not IS_ROOT:
        pytest.skip("needs real root: it mounts file systems")
    data = test_area / "pinning"
    environment = {"PYTHONPATH": str(ROOT / "src"), "SANDKEEP_HOME": str(data)}
    interpreter, user = sys.executable, None
    if request.param != "root":
        user = request.getfixturevalue("ordinary_user" if request.param == "subuid" else "single_user")
        assert isinstance(user, User)
        data, interpreter = user.home / "pinning", user.interpreter
        environment = {"SANDKEEP_HOME": str(data)}

    def run(*arguments: str) -> str:
        command = [interpreter, "-m", "sandkeep", *arguments]
        done: subprocess.CompletedProcess[str]
        if user is not None:
            done = user.run(command, env=environment)
        else:
            variables = {**os.environ, **environment}
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    server = int((data / "server.lock").read_text())
    os.kill(server, signal.SIGTERM)
    until(lambda: not os.path.exists(f"/proc/{server}"))
    remove_tree(data)


@pytest.fixture
def host(test_area: Path) -> Iterator[Path]:
    """A directory whose mounts propagate, as all do on a machine with systemd."""
    place = test_area / "host"
    place.mkdir()
    syscalls.mount("tmpfs", str(place), "tmpfs", 0, "mode=0755")
    syscalls.mount(None, str(place), None, _MS_SHARED)
    try:
        yield place
    finally:
        syscalls.umount2(str(place), syscalls.MNT_DETACH)
        place.rmdir()


def _mount_disk(host: Path) -> tuple[Path, str]:
    """A file system in a file; where it is mounted, and its device number as mount tables show it."""
    image, disk = host / "image", host / "disk"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    disk.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
    device = disk.stat().st_dev
    return disk, f"{os.major(device)}:{os.minor(device)}"


def _holders(device: str) -> list[str]:
    """Processes in whose mount namespace the device is mounted."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f" {device} " in (entry / "mountinfo").read_text():
                found.append(f"{entry.name} {(entry / 'comm').read_text().strip()}")
        except OSError:
            continue
    return found


def _loops(image: Path) -> str:
    return subprocess.run(["losetup", "-j", str(image)], capture_output=True, text=True, check=True).stdout


def test_what_the_host_unmounts_is_free_while_sessions_run(sandkeep: Sandkeep, host: Path) -> None:
    """Mounted before the server starts: zygote, worker, netd, prepared and running sessions let it go."""
    disk, device = _mount_disk(host)
    try:
        sandkeep("create", "--name", "there")
        names = {line.split(" ", 1)[1] for line in _holders(device)}
        assert {"sandkeep-zygote", "sandkeep-superv"} <= names, names
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    try:
        assert _holders(device) == []
        until(lambda: not _loops(host / "image"))
        assert sandkeep("exec", "there", "--", "echo", "alive") == "alive\n"
    finally:
        sandkeep("rm", "there")


def test_nothing_that_sessions_mount_shows_on_the_host(sandkeep: Sandkeep, host: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    sandkeep("run", "--", "true")
    assert Path("/proc/self/mountinfo").read_text() == before
