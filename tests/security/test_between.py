"""Between sessions, and between a session and the host: what each can see of the other."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep.errors import PathError
from tests.driver_lab import Box, Lab
from tests.mode_runner import MODES, Ask, common, everywhere, in_modes, opened

IDS = 65_536
SHARED_COUNTERS = "rootless sessions belong to one user, who is charged for all of them"


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def python(box: Box, script: str, *args: str, root: bool = False) -> str:
    done = box.run("python3", "-I", "-c", script, *args, root=root)
    assert done.code == 0, done.stderr
    return done.stdout.strip()


def keep(box: Box, script: str, *, root: bool = False) -> None:
    """Run something that says ``ready`` and then holds what it has until the session ends."""
    process = box.start(
        "python3",
        "-I",
        "-c",
        f"{script}\nprint('ready', flush=True)\nimport time; time.sleep(1000)",
        root=root,
    )
    while not box.output(process):
        assert box.lab.do(box.lab.driver.process(box.ref, process)).status == "running"


@in_modes("root", why="rootless sessions share the ids of their user")
def test_each_session_has_ids_of_its_own(lab: Lab) -> None:
    ranges = []
    for box in (lab.box(), lab.box()):
        inside, first, count = map(int, box.sh("cat /proc/self/uid_map").stdout.split())
        assert (inside, count) == (0, IDS) and first >= 0x70000000
        ranges.append(first)
        keep(box, "")
        keep(box, "", root=True)
        init = int(box.created.init_pid)
        children = Path(f"/proc/{init}/task/{init}/children").read_text().split()
        owners = {os.stat(f"/proc/{pid}").st_uid for pid in children}
        assert owners == {first, first + 1000}
        assert box.sh("cat /proc/self/gid_map").stdout.split() == ["0", str(first), str(IDS)]
    assert abs(ranges[0] - ranges[1]) >= IDS


@in_modes("root", why="rootless, setuid files belong to the user, behind the same closed door")
def test_a_setuid_file_inside_is_out_of_everybodys_reach_outside(lab: Lab) -> None:
    box = lab.box()
    box.sh("cp /bin/cat /tmp/mine; chown root:root /tmp/mine; chmod 4755 /tmp/mine", root=True)
    path = f"{box.directory}/fs/root/tmp/mine"
    info = os.stat(path)
    # On disk it is root's: layers are portable because ids there are the sandbox's own.
    assert info.st_uid == 0 and info.st_mode & stat.S_ISUID
    for closed in (lab.data_dir, box.directory):
        assert stat.S_IMODE(os.stat(closed).st_mode) == 0o700
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        try:
            os.stat(path)
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


@everywhere
def test_the_store_is_closed_to_others(lab: Lab) -> None:
    assert stat.S_IMODE(os.stat(lab.data_dir).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(common(lab).directory).st_mode) == 0o700


@in_modes("root", why=SHARED_COUNTERS)
def test_one_session_cannot_use_up_the_inotify_instances_of_another(lab: Lab) -> None:
    take = (
        "import ctypes\nlibc = ctypes.CDLL(None)\ncount = 0\n"
        "while libc.inotify_init() >= 0: count += 1\nprint(count, flush=True)\n"
    )
    first, second = lab.box(), lab.box()
    limit = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    holder = first.start("python3", "-I", "-c", f"{take}\nimport time; time.sleep(1000)")
    while not first.output(holder):
        pass
    taken = int(python(second, take))
    assert taken == min(limit, taken) and taken >= min(limit, 100)
    pid = os.fork()
    if pid == 0:  # the host's own user is not charged either
        os._exit(0 if ctypes.CDLL(None).inotify_init() >= 0 else 1)
    assert os.waitpid(pid, 0)[1] == 0


CONNECT = """
import socket, sys
for address in sys.argv[2:]:
    try:
        with socket.create_connection((address, int(sys.argv[1])), 3) as s:
            s.settimeout(0.2)
            print(address, s.recv(100))
    except OSError:
        pass
"""


@everywhere
def test_there_is_no_network_but_loopback_and_that_is_its_own(lab: Lab) -> None:
    """Whatever a connection from inside meets, it is not the host and not what the host can reach."""
    box = common(lab)
    assert python(box, "import socket; print([name for _, name in socket.if_nameindex()])") == "['lo']"
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = str(server.getsockname()[1])
        for root in (True, False):
            hosts = ["127.0.0.1", "127.0.0.2", "169.254.169.254", *_addresses()]
            answers = python(box, CONNECT, port, *hosts, root=root).splitlines()
            assert not [line for line in answers if not line.endswith(" b''")], "nobody is there to answer"
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    talk = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 8080))\n"
        "client = socket.create_connection(('127.0.0.1', 8080))\n"
        "server.accept()[0].sendall(b'hello')\nprint(client.recv(10).decode())\n"
    )
    assert python(box, talk) == "hello"


def _addresses() -> list[str]:
    """The host's own addresses, as far as it can tell without asking anybody."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return []
        return [str(probe.getsockname()[0])]


@everywhere
def test_sockets_memory_queues_and_processes_of_others_are_not_there(lab: Lab) -> None:
    first, second = lab.box(), lab.box()
    name = f"sandkeep-{os.getpid()}"
    keep(
        first,
        "import ctypes, os, socket\n"
        f"s = socket.socket(socket.AF_UNIX); s.bind('\\0{name}'); s.listen()\n"
        "assert ctypes.CDLL(None).shmget(4711, 4096, 0o1666) >= 0\n"
        "open('/dev/mqueue/queue', 'w'); open('/dev/shm/memory', 'w'); open('/tmp/file', 'w')\n",
    )
    look = (
        "import ctypes, errno, glob, json, os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(json.dumps({\n"
        "  'abstract': s.connect_ex('\\0' + sys.argv[1]), 'shm': libc.shmget(4711, 4096, 0),\n"
        "  'found': list(filter(os.path.exists, ('/dev/mqueue/queue', '/dev/shm/memory', '/tmp/file'))),\n"
        "  'processes': sorted(int(p[6:]) for p in glob.glob('/proc/[0-9]*'))}))\n"
    )
    seen = json.loads(python(first, look, name))
    assert seen["abstract"] == 0 and seen["shm"] >= 0 and len(seen["found"]) == 3
    other = json.loads(python(second, look, name, root=True))
    assert other["abstract"] == 111 and other["shm"] == -1 and other["found"] == []
    assert len(other["processes"]) == 2 and other["processes"][0] == 1
    with socket.socket(socket.AF_UNIX) as outside:
        assert outside.connect_ex(f"\0{name}") == 111
        outside.close()
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(f"\0{name}-host")
        ours.listen()
        assert json.loads(python(second, look, f"{name}-host"))["abstract"] == 111


@everywhere
def test_the_hosts_own_files_are_not_in_the_host_image(lab: Lab) -> None:
    box = common(lab)
    own = "-not -path /home/sandbox"
    places = "/root /home /srv /mnt /media /boot /opt"
    listing = f"find {places} -mindepth 1 -not -name '.*' {own} 2>/dev/null | head"
    assert box.sh(listing, root=True).stdout == ""
    for path in (
        "/var/run/docker.sock",
        "/run/docker.sock",
        "/run/systemd",
        "/run/dbus",
        "/etc/ssh/ssh_host_rsa_key",
    ):
        assert box.sh(f"test -e {path}", root=True).code == 1, path
    shadow = box.sh("cat /etc/shadow", root=True).stdout
    assert shadow and {line.split(":")[1][:1] for line in shadow.splitlines()} <= {"*", "!"}
    places = "/etc/ssl/private /etc/apt/auth.conf /etc/apt/auth.conf.d /usr/local/etc"
    assert box.sh(f"find {places} -type f", root=True).stdout == ""
    users = box.sh("cut -d: -f3 /etc/passwd").stdout.split()
    assert [uid for uid in map(int, users) if 1000 < uid < 65_000] == []


@everywhere
def test_the_hosts_files_cannot_be_changed_through_the_host_image(lab: Lab) -> None:
    box = lab.box()
    victim = "/usr/share/sandkeep-probe"
    box.sh(
        f"echo mine >{victim}; echo mine >/usr/bin/sandkeep-probe; rm -f /usr/bin/yes; echo >/etc/passwd",
        root=True,
    )
    assert not os.path.exists(victim) and not os.path.exists("/usr/bin/sandkeep-probe")
    assert os.path.exists("/usr/bin/yes") and os.path.getsize("/etc/passwd") > 10
    assert common(lab).sh(f"test -e {victim}").code == 1


@everywhere
def test_what_a_session_has_mounted_cannot_be_taken_away_by_file_operations(lab: Lab) -> None:
    box = common(lab)
    for path in ("/proc", "/dev", "/sys", "/dev/pts", "/dev/shm"):
        for operation in (
            {"operation": "remove", "path": path},
            {"operation": "remove", "path": path, "recursive": True},
            {"operation": "rename", "path": path, "target": "/elsewhere"},
        ):
            with pytest.raises(PathError) as refused:
                box.files(root=True, **operation)
            assert refused.value.errno in (errno.EBUSY, errno.EROFS), (operation, str(refused.value))
    assert box.sh("test -e /proc/self/status && test -c /dev/null && test -d /sys/kernel").code == 0
