"""What every test may rely on: who runs it, ordinary users to run things as, and a machine left as it was.

As root the whole run happens in a mount namespace and in control groups of its own, so that "left behind"
can be told exactly even while other things run on the machine. ``SANDKEEP_HOME`` and ``TMPDIR`` point into a
directory that is checked and removed at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sandkeep.linux import cgroup, syscalls

ROOT = Path(__file__).resolve().parent.parent
IS_ROOT = os.geteuid() == 0
SUBIDS = 65536
_TOOLS_NOBODY_IMPORTS = ("mypy", "mypyc", "pip", "ruff", "setuptools", "*.pth")

_CALL = """
import importlib, json, os, sys
module, function, arguments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
result = getattr(importlib.import_module(module), function)(*arguments)
with os.fdopen(int(sys.argv[4]), "w") as out:
    json.dump(result, out)
"""


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell: programs under test would inherit that and not hear Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # started by nohup: the same


def remove_tree(path: str | Path) -> None:
    """Delete what sandkeep kept for us; as an ordinary user, files of our subordinate ids with it."""
    if not IS_ROOT:
        subprocess.run(["unshare", "--map-root-user", "--map-auto", "rm", "-rf", "--", path], check=False)
    if os.path.lexists(path):
        shutil.rmtree(path)


# --- ordinary users ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class User:
    """An account without privileges, and a Python that it can run with the project importable."""

    name: str
    uid: int
    gid: int
    home: Path
    subids: int | None
    """Start of its subordinate id range."""
    interpreter: str
    pythonpath: str

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        input: str | None = None,
        timeout: float = 60,
        env: dict[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as this user, in its home, with a small environment."""
        switch: dict[str, Any] = {}
        if IS_ROOT:
            switch = {"user": self.uid, "group": self.gid, "extra_groups": []}
        return subprocess.run(
            argv,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=self.home,
            env={**self.environment(), **(env or {})},
            pass_fds=pass_fds,
            start_new_session=True,
            **switch,
        )

    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "USER": self.name,
            "LOGNAME": self.name,
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "LANG": "C.UTF-8",
            "PYTHONPATH": self.pythonpath,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONWARNINGS": "error",
            "SANDKEEP_HOME": str(self.home / "data"),
            "TMPDIR": str(self.home / "tmp"),
        }

    def python(self, code: str, *args: str, **how: Any) -> subprocess.CompletedProcess[str]:
        """Run Python source as this user."""
        return self.run([self.interpreter, "-c", code, *args], **how)

    def call(self, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Call a module-level function of a test or of the package as this user.

        Arguments and result travel as JSON. A failure inside fails the calling test with the traceback.
        """
        read, write = os.pipe()
        with os.fdopen(read) as answers:
            try:
                done = self.python(
                    _CALL,
                    function.__module__,
                    function.__name__,
                    json.dumps(args),
                    str(write),
                    pass_fds=(write,),
                    **how,
                )
            finally:
                os.close(write)
            if done.returncode:
                pytest.fail(
                    f"{function.__name__} as {self.name} ended with {done.returncode}\n"
                    f"{done.stdout}{done.stderr}",
                    pytrace=False,
                )
            return json.loads(answers.read())


def _readable(user: User, path: str) -> bool:
    return user.run(["test", "-r", path, "-a", "-x", path]).returncode == 0


def _share(user: User, area: Path) -> User:
    """Give the user the project and pytest by path, from copies where the originals are closed to it."""
    interpreter = os.path.realpath(sys.executable)
    if not _readable(user, interpreter):
        interpreter = "/usr/bin/python3"
    check = user.run([interpreter, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"])
    if check.returncode:
        pytest.skip(f"{user.name} can run no Python >= 3.11")
    spec = find_spec("pytest")
    assert spec is not None and spec.origin is not None
    site = Path(spec.origin).parent.parent
    if _readable(user, str(ROOT / "src/sandkeep")) and _readable(user, str(site)):
        paths = [ROOT / "src", ROOT, site]
    else:
        copy = area / "project"
        skip = shutil.ignore_patterns("__pycache__")
        if not copy.exists():
            shutil.copytree(ROOT / "src", copy / "src", ignore=skip)
            shutil.copytree(ROOT / "tests", copy / "tests", ignore=skip)
            skip = shutil.ignore_patterns("__pycache__", *_TOOLS_NOBODY_IMPORTS)
            shutil.copytree(site, copy / "site", ignore=skip)
        paths = [copy / "src", copy, copy / "site"]
    pythonpath = os.pathsep.join(map(str, paths))
    return User(user.name, user.uid, user.gid, user.home, user.subids, interpreter, pythonpath)


def subordinate_ids(name: str) -> int | None:
    try:
        for line in Path("/etc/subuid").read_text().splitlines():
            owner, start, count = line.split(":")
            if owner in (name, str(os.getuid())) and int(count) >= SUBIDS:
                return int(start)
    except (OSError, ValueError):
        pass
    return None


def _account_tool(*argv: str) -> None:
    """Account tools take a lock that another run may hold for a moment."""
    for _ in range(240):
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode == 0:
            return
        if "lock" not in done.stderr:
            break
        time.sleep(0.25)
    pytest.fail(f"{' '.join(argv)}: {done.stderr.strip()}")


def _make_user(kind: str, area: Path, *, subids: int | None) -> User:
    name = f"sk{kind}{os.getpid()}"
    home = area / kind
    _account_tool("useradd", "-r", "-U", "-M", "-s", "/bin/sh", "-d", str(home), name)
    if subids is not None:
        last = subids + SUBIDS - 1
        _account_tool(
            "usermod", "--add-subuids", f"{subids}-{last}", "--add-subgids", f"{subids}-{last}", name
        )
    entry = pwd.getpwnam(name)
    home.mkdir(mode=0o755)
    (home / "tmp").mkdir()
    for path in (home, home / "tmp"):
        os.chown(path, entry.pw_uid, entry.pw_gid)
    return _share(User(name, entry.pw_uid, entry.pw_gid, home, subids, sys.executable, ""), area)


def _processes_of(user: User) -> list[str]:
    """Processes with the user's id or one of its subordinate ids."""
    first = user.subids or 0
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            uid = entry.stat().st_uid
            if uid == user.uid or (user.subids and first <= uid < first + SUBIDS):
                found.append(f"{entry.name} {(entry / 'comm').read_text().strip()}")
        except OSError:
            continue
    return found


def _drop_user(user: User) -> None:
    left = _settled(lambda: _processes_of(user))
    for line in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), 9)
    _account_tool("userdel", user.name)
    shutil.rmtree(user.home, ignore_errors=True)
    if left:
        pytest.fail(f"processes of {user.name} were left running: {left}", pytrace=False)


def _myself(area: Path, *, subids: int | None) -> User:
    entry = pwd.getpwuid(os.getuid())
    home = area / "home"
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    return _share(User(entry.pw_name, entry.pw_uid, entry.pw_gid, home, subids, sys.executable, ""), area)


@pytest.fixture(scope="session")
def ordinary_user(test_area: Path) -> Iterator[User]:
    """A user with a subordinate id range: made for this run under root, else whoever runs the tests."""
    if not (shutil.which("newuidmap") and shutil.which("newgidmap")):
        pytest.skip("newuidmap and newgidmap are not installed (package uidmap)")
    if not IS_ROOT:
        mine = subordinate_ids(os.environ.get("USER", ""))
        if mine is None:
            pytest.skip("the user running the tests has no range in /etc/subuid")
        yield _myself(test_area, subids=mine)
        return
    # High and spread by pid: clear of login users, of the ranges sessions get, and of other runs.
    user = _make_user("range", test_area, subids=(1 << 31) + (os.getpid() % 8192) * SUBIDS)
    yield user
    _drop_user(user)


@pytest.fixture(scope="session")
def single_user(test_area: Path) -> Iterator[User]:
    """A user with no subordinate ids, so that a user namespace of its own can map one id only."""
    if not IS_ROOT:
        if subordinate_ids(os.environ.get("USER", "")) is not None:
            pytest.skip("the user running the tests has a range in /etc/subuid")
        yield _myself(test_area, subids=None)
        return
    user = _make_user("one", test_area, subids=None)
    yield user
    _drop_user(user)


# --- nothing left behind -------------------------------------------------------------------------------


def _settled(look: Callable[[], list[str]], *, seconds: float = 10.0) -> list[str]:
    """What is still there after giving asynchronous clean-up a moment."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [" ".join(line.split(" ")[3:5]) + " " + line.partition(" - ")[2] for line in lines]


def descendants(pid: int) -> list[str]:
    """The processes below one, as pid and name."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue  # that thread has ended
        for child in children:
            try:
                found.append(f"{child} {Path(f'/proc/{child}/comm').read_text().strip()}")
                found += descendants(int(child))
            except OSError:
                continue
    return found


def _ended(name: str) -> bool:
    """Whether a thing named after a run belongs to one that is over: killed before it could clean up."""
    found = re.fullmatch(r"(?:sandkeep-test-|skrange|skone)(\d+)(?:-\w+)?", name)
    return found is not None and not os.path.exists(f"/proc/{found[1]}")


def _sweep_groups(above: Path) -> None:
    for stale in above.glob("sandkeep-test-*"):
        if _ended(stale.name):
            for directory, _, _ in os.walk(stale, topdown=False):  # another worker may be sweeping too
                _rmdir(Path(directory))


def _rmdir(group: Path) -> None:
    try:
        group.rmdir()
    except OSError:
        pass  # something in it still runs; the next run tries again


def _sweep_files_and_users() -> None:
    for stale in Path(tempfile.gettempdir()).glob("sandkeep-test-*"):
        try:
            mine = stale.stat().st_uid == os.geteuid()
        except FileNotFoundError:
            continue  # another worker was first
        if _ended(stale.name) and mine:
            with contextlib.suppress(OSError):  # another worker may be sweeping too
                remove_tree(stale)
    if IS_ROOT:
        for entry in pwd.getpwall():
            if _ended(entry.pw_name):
                subprocess.run(["userdel", "--force", entry.pw_name], capture_output=True, check=False)


class _OwnGroups:
    """Control groups holding this run, so that every group and process made by it can be found again."""

    def __init__(self) -> None:
        self.hierarchy = cgroup.detect(parent=f"sandkeep-test-{os.getpid()}")
        self.session: cgroup.SessionCgroup | None = None
        # On pure v2 a nested group would have no controllers, and the tests would see less than a user does.
        if IS_ROOT and self.hierarchy.layout in ("hybrid", "v1"):
            self.session = self.hierarchy.create("run")
            self.session.attach(os.getpid())
            for path in self.session.paths():
                _sweep_groups(Path(path).parent.parent)

    def processes(self) -> list[str]:
        if self.session is None:
            return descendants(os.getpid())
        pids: set[int] = set()
        for group in [*self.session.paths(), *self.groups()]:
            try:
                pids |= set(map(int, Path(group, "cgroup.procs").read_text().split()))
            except OSError:
                continue  # that group is being removed
        found = []
        for pid in sorted(pids - {0, os.getpid()}):
            try:
                found.append(f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
            except OSError:
                continue
        return found

    def groups(self) -> list[str]:
        if self.session is None:
            return cgroup.detect().leftovers()
        # Walked rather than globbed: groups go away meanwhile, and that must not be a failure.
        return [
            os.path.join(directory, name)
            for path in self.session.paths()
            for directory, names, _ in os.walk(path)
            for name in names
        ]

    def leave(self) -> None:
        if self.session is not None:
            for path in self.session.paths():
                Path(path).parent.parent.joinpath("cgroup.procs").write_text(str(os.getpid()))
            self.session.remove()


def _private_mounts() -> None:
    if IS_ROOT:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)


@pytest.fixture(scope="session", autouse=True)
def test_area() -> Iterator[Path]:
    """A world-readable directory for the whole run. Its end is where leaks of any kind fail the run."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    _sweep_files_and_users()
    area = Path(tempfile.mkdtemp(prefix=f"sandkeep-test-{os.getpid()}-"))
    area.chmod(0o755)
    temporary = area / "tmp"
    temporary.mkdir(mode=0o1777)
    saved = {name: os.environ.get(name) for name in ("TMPDIR", "SANDKEEP_HOME")}
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    os.environ["SANDKEEP_HOME"] = str(area / "data")
    _private_mounts()
    mounts = set(_mounts())
    groups = _OwnGroups()
    yield area
    look: dict[str, Callable[[], list[str]]] = {
        "processes": groups.processes,
        "control groups": groups.groups,
        "mounts": lambda: [mount for mount in _mounts() if mount not in mounts],
        "temporary files": lambda: [entry.name for entry in temporary.iterdir()],
    }
    _settled(lambda: [found for kind in look.values() for found in kind()])
    leaks = {kind: found() for kind, found in look.items()}
    for line in leaks["processes"]:
        try:
            os.kill(int(line.split()[0]), 9)
        except ProcessLookupError:
            pass
    _settled(groups.processes)
    groups.leave()
    tempfile.tempdir = None
    for name, value in saved.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    remove_tree(area)
    report = "\n".join(f"  {kind}: {', '.join(found)}" for kind, found in leaks.items() if found)
    if report:
        pytest.fail(f"the run left things behind\n{report}", pytrace=False)


# --- who runs this, and where --------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import HealthCheck, settings  # here only: other users' processes import this file too

    # How long an example takes says how busy the machine is, and nothing about what is tested.
    settings.register_profile("sandkeep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("sandkeep")
    if not IS_ROOT and not config.option.basetemp:
        # Where pytest keeps what tests wrote it cannot remove files of our subordinate ids, and says so as
        # an error a few runs later. Here the next run sweeps.
        name = f"sandkeep-test-{os.getpid()}-{secrets.token_hex(4)}"
        config.option.basetemp = os.path.join(tempfile.gettempdir(), name)


def pytest_report_header() -> list[str]:
    hierarchy = cgroup.detect()
    usable = [name for name, found in hierarchy.capabilities.items() if found.usable]
    return [
        f"sandkeep: {'root' if IS_ROOT else 'rootless'}, Linux {os.uname().release} {os.uname().machine}",
        f"control groups: {hierarchy.layout}; usable: {', '.join(usable) or 'nothing'}",
    ]


# Worth their time before a change lands, not after every edit.
SLOW = (
    "tests/conformance/",
    "tests/engine/test_crash.py",
    "tests/engine/test_growth.py",
    "tests/engine/test_steps.py",
    "tests/faults/",
    "tests/host/test_default_box.py",
    "tests/host/test_distribution.py",
    "tests/host/test_host_image_changes.py",
    "tests/host/test_images_",
    "tests/host/test_sharing.py",
    "tests/net/test_clients.py",
    "tests/net/test_floods.py",
    "tests/net/test_redteam.py",
    "tests/cli/test_terminal.py",
    "tests/cli/test_uninstall.py",
    "tests/cli/test_damage.py",
    "tests/sdk/_async/test_outages.py",
    "tests/sdk/sync/",  # written from the other half, whose tests are run
    "tests/server/test_fuzz.py",
    "tests/server/test_lifetimes.py",
    "tests/engine/test_clock.py",
    "tests/engine/test_git.py",
    "tests/engine/test_model.py",
    "tests/engine/test_sources.py",
    "tests/cli/test_first_start.py",
    "tests/cli/test_keeping.py",
    "tests/cli/test_network.py",
    "tests/cli/test_progress.py",
    "tests/cli/test_server.py",
    "tests/sdk/test_cancellation.py",
    "tests/sdk/test_memory.py",
    "tests/sdk/test_reattach.py",
    "tests/sdk/test_typing.py",
    "tests/security/test_checkpoint_memory.py",
    "tests/server/test_backup.py",
    "tests/server/test_settings.py",
)


FIRST = ("tests/engine/test_steps.py", "tests/vm/")
"""Files that take many minutes. Begun first, they do not keep one worker busy when the others are done."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    if "long" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    if not IS_ROOT:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs real root"))
