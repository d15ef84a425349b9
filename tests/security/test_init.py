"""PID 1 is host code inside the sandbox: what it holds, what it shows, and what it can be talked into."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep.errors import PathError, SandkeepError
from tests.conftest import IS_ROOT
from tests.driver_lab import Lab
from tests.mode_runner import MODES, Ask, common, everywhere, opened
from tests.polling import ENOUGH


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def used_init(lab: Lab) -> int:
    """Host pid of the init of a session that has run things of every kind."""
    box = lab.box()
    box.run("true")
    box.run("true", root=True)
    box.run("cat", pty=(24, 80), kill_after_ms=50)
    box.run("true", rlimits={"nofile": 100}, kill_after_ms=10_000)
    box.run("true", env={"LARGE": "x" * 100_000})
    for _ in range(5):
        with pytest.raises(SandkeepError):
            box.run("no-such-program", stdin=True)
        with pytest.raises(SandkeepError):
            box.run("/no/such/program", pty=(24, 80))
    box.run("sleep", "100", stdin=True, kill_after_ms=50)
    return int(box.created.init_pid)


@pytest.mark.root
def test_init_holds_the_null_device_its_control_socket_and_what_it_waits_with(ask: Ask) -> None:
    """Listed from the host, after it has served requests of every kind: nothing has been left open."""
    pid = ask(used_init)
    # What stood between init and a command that was killed goes a moment after the command.
    deadline = time.monotonic() + ENOUGH
    while len(os.listdir(f"/proc/{pid}/fd")) > 7 and time.monotonic() < deadline:
        time.sleep(0.02)
    held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in sorted(map(int, os.listdir(f"/proc/{pid}/fd")))]
    # The root of the path it was opened by is gone from init's view, so only the last part is left.
    assert [os.path.basename(name) for name in held[:3]] == ["null", "null", "null"]
    assert held[3].startswith("socket:")
    assert sorted(name.split("[")[0] for name in held[4:]) == ["anon_inode:", "pipe:", "pipe:"]
    assert "anon_inode:[eventpoll]" in held
    assert len({name for name in held if name.startswith("pipe:")}) == 1


@pytest.mark.root
def test_init_shows_nothing_of_the_host(ask: Ask) -> None:
    pid = ask(used_init)
    assert Path(f"/proc/{pid}/environ").read_bytes().strip(b"\0") == b""
    assert Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0 ") == b"sandkeep-init"
    assert Path(f"/proc/{pid}/comm").read_text() == "sandkeep-init\n"
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        assert line.split()[4].split("/")[1] in ("", "proc", "dev", "sys", "usr"), line
    inside = {os.stat(f"/proc/{pid}/ns/{kind}").st_ino for kind in os.listdir(f"/proc/{pid}/ns")}
    ours = {os.stat(f"/proc/self/ns/{kind}").st_ino for kind in os.listdir("/proc/self/ns")}
    assert not inside & ours


@everywhere
def test_a_working_directory_reached_through_a_descriptor_is_none(lab: Lab) -> None:
    """Neither by /proc/self/fd, which is init's while it starts something, nor by links to such places."""
    box = common(lab)
    box.sh(
        "cd /tmp; ln -sfn /proc/self/fd/3 fd3; ln -sfn /proc/1/cwd cwd; ln -sfn /proc/1/root root;"
        "ln -sfn /proc/self/root self; ln -sfn fd3 chain; ln -sfn /proc/self/cwd/../../.. up"
    )
    places = [f"/proc/self/fd/{fd}" for fd in range(12)] + [f"/proc/1/fd/{fd}" for fd in range(5)]
    places += [f"/proc/self/fd/{fd}/../../../../.." for fd in (3, 4, 5, 6)]
    places += ["/tmp/fd3", "/tmp/chain", "/proc/1/task/1/fd/3", "/dev/fd/3", "/dev/stdin"]
    for root in (True, False):
        for place in places:
            with pytest.raises(PathError):
                box.run("pwd", cwd=place, root=root)
        # Places of its own that really are inside the sandbox's root are no harm: it ends up there.
        for place in ("/tmp/cwd", "/tmp/root", "/tmp/self", "/tmp/up", "/proc/1/cwd", "/proc/1/root"):
            try:
                done = box.run(
                    "python3", "-c", "import os; print(os.getcwd(), os.stat('/').st_ino)", cwd=place
                )
            except PathError:
                continue
            where, inode = done.stdout.split()
            assert where == "/" and inode == box.sh("stat -c %i /").stdout.strip()
    assert box.run("pwd", cwd="/tmp").stdout == "/tmp\n"


@everywhere
def test_nothing_of_the_host_is_visible_from_a_process(lab: Lab) -> None:
    box = common(lab)
    script = (
        "import glob, os\n"
        "for name in ('mountinfo', 'environ', 'cmdline', 'maps', 'cgroup', 'status'):\n"
        "    print(open(f'/proc/self/{name}').read())\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline') + ['/proc/mounts', '/proc/1/status']:\n"
        "    try: print(open(path).read())\n"
        "    except OSError: pass  # it has ended since\n"
    )
    for root in (True, False):
        text = box.run("python3", "-I", "-c", script, root=root).stdout
        for secret in (
            lab.data_dir,
            os.path.dirname(lab.data_dir),
            os.uname().nodename + ".",
            "start_zygote",
        ):
            assert secret not in text
        assert "sandkeep-init" in text
    assert box.sh(f"test -e {lab.data_dir}", root=True).code == 1
    groups = box.sh("cut -d: -f3 /proc/self/cgroup | sort -u").stdout.split()
    if lab.driver.mode == "root" and IS_ROOT:
        assert groups == ["/"]
