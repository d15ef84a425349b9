"""The file formats of cgroup v2, and layouts this machine may not have, on directory trees that mimic them.

``FakeCgroup2`` behaves like the kernel where it matters: a new group has the files its parent's
``subtree_control`` grants, a process is in one group, a group with processes cannot pass controllers on
unless it is the root, and removing a group minds its children but not its files.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep.errors import HostCannot, InvalidRequest, LimitUnenforceable, NotFound
from sandkeep.linux import cgroup
from sandkeep.linux.cgroup import groupfs, units

CORE = {
    "cgroup.procs": "",
    "cgroup.controllers": "",
    "cgroup.subtree_control": "",
    "cgroup.events": "populated 0\nfrozen 0\n",
    "cgroup.freeze": "0\n",
    "cgroup.kill": "",
    "cgroup.type": "domain\n",
    "cpu.stat": "usage_usec 0\nuser_usec 0\nsystem_usec 0\n",
}
BY_CONTROLLER = {
    "memory": {
        "memory.max": "max\n",
        "memory.swap.max": "max\n",
        "memory.current": "0\n",
        "memory.peak": "0\n",
        "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n",
    },
    "pids": {"pids.max": "max\n", "pids.current": "0\n"},
    "cpu": {"cpu.max": "max 100000\n"},
}


class FakeCgroup2:
    def __init__(self, root: Path, *, available: str = "cpu memory pids") -> None:
        self.root = root
        self.mountinfo = root.parent / "mountinfo"
        self.own = root.parent / "own"
        self.first = root.parent / "first"
        self.hidden: set[str] = set()
        root.mkdir()
        for name, text in CORE.items():
            if name not in ("cgroup.type", "cgroup.events", "cgroup.freeze", "cgroup.kill"):
                (root / name).write_text(text)
        (root / "cgroup.controllers").write_text(available)
        self.mountinfo.write_text(
            f"41 31 0:38 / {root} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
        )
        self.place("/")

    def place(self, path: str) -> Path:
        """Say where the calling process is."""
        self.own.write_text(f"0::{path}\n")
        return self.root / path.lstrip("/")

    def group(self, path: str, *, subtree: str = "") -> Path:
        group = self.root / path
        self.mkdir(str(group))
        (group / "cgroup.subtree_control").write_text(subtree)
        return group

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        os.mkdir(path, mode)
        granted = (Path(path).parent / "cgroup.subtree_control").read_text().split()
        files = dict(CORE)
        for controller in granted:
            files |= BY_CONTROLLER[controller]
        files["cgroup.controllers"] = " ".join(granted)
        for name, text in files.items():
            if name not in self.hidden:
                Path(path, name).write_text(text)

    def rmdir(self, path: str) -> None:
        if any(entry.is_dir() for entry in Path(path).iterdir()):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        shutil.rmtree(path)

    def write(self, path: str, value: object) -> None:
        file = Path(path)
        if file.name == "cgroup.procs":
            for procs in self.root.rglob("cgroup.procs"):
                kept = [pid for pid in procs.read_text().split() if pid != str(value)]
                procs.write_text("".join(f"{pid}\n" for pid in kept))
            with file.open("a") as handle:
                handle.write(f"{value}\n")
        elif file.name == "cgroup.subtree_control":
            if file.parent != self.root and (file.parent / "cgroup.procs").read_text():
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
            asked = {name.removeprefix("+") for name in str(value).split()}
            if not asked <= set((file.parent / "cgroup.controllers").read_text().split()):
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            file.write_text(" ".join(sorted(asked | set(file.read_text().split()))))
        elif file.exists():
            file.write_text(str(value))
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def detect(self) -> cgroup.Hierarchy:
        return cgroup.detect(str(self.mountinfo), str(self.own), first=str(self.first))

    def service(self, path: str, pids: str = "10\n11\n") -> Path:
        """Be in the group of a service that a systemd runs, with every controller in reach."""
        self.first.write_text("0::/init.scope\n")
        (self.root / "cgroup.subtree_control").write_text("cpu memory pids")
        for end in range(1, path.count("/") + 1):
            above = "/".join(path.split("/")[:end])
            if not (self.root / above).exists():
                self.group(above, subtree="cpu memory pids")
        own = self.group(path)
        (own / "cgroup.procs").write_text(pids)
        self.place(f"/{path}")
        return own


@pytest.fixture
def v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCgroup2]:
    fake = FakeCgroup2(tmp_path / "cgroup")
    monkeypatch.setattr(groupfs, "mkdir", fake.mkdir)
    monkeypatch.setattr(groupfs, "rmdir", fake.rmdir)
    monkeypatch.setattr(groupfs, "write", fake.write)
    yield fake


def usable(hierarchy: cgroup.Hierarchy) -> set[str]:
    return {name for name, found in hierarchy.capabilities.items() if found.usable}


def test_v2_root_offers_controllers_only_after_prepare(v2: FakeCgroup2) -> None:
    hierarchy = v2.detect()
    assert hierarchy.layout == "v2"
    assert usable(hierarchy) == {"freeze", "kill", "cpu_time", "process_groups"}
    assert "does not pass it on" in hierarchy.capabilities["memory"].why

    hierarchy.prepare([os.getpid()])
    assert usable(hierarchy) == set(cgroup.CAPABILITIES)
    assert (v2.root / "cgroup.subtree_control").read_text() == "cpu memory pids"


def test_v2_preparable_says_what_prepare_would_give_and_changes_nothing(v2: FakeCgroup2) -> None:
    hierarchy = v2.detect()
    assert set(hierarchy.preparable()) == {"memory", "pids", "cpu"}
    assert (v2.root / "cgroup.subtree_control").read_text() == ""
    assert "memory" not in usable(hierarchy)


def test_v2_limits_are_written_in_the_kernels_format(v2: FakeCgroup2) -> None:
    session = v2.detect().prepare().create("s1")
    session.limit(memory=64 << 20, pids=100, cpu=1.5)
    group = v2.root / "sandkeep/s1"
    assert (group / "memory.max").read_text() == str(64 << 20)
    assert (group / "memory.swap.max").read_text() == "0"
    assert (group / "pids.max").read_text() == "100"
    assert (group / "cpu.max").read_text() == "150000 100000"
    session.limit(cpu=0.001)
    assert (group / "cpu.max").read_text() == "1000 100000", "the kernel's smallest quota"


def test_v2_usage_is_read_from_flat_and_keyed_files(v2: FakeCgroup2) -> None:
    session = v2.detect().prepare().create("s1")
    group = v2.root / "sandkeep/s1"
    (group / "cpu.stat").write_text("usage_usec 1234567\nuser_usec 1\nsystem_usec 2\n")
    (group / "memory.current").write_text("4096\n")
    (group / "memory.peak").write_text("8192\n")
    (group / "pids.current").write_text("7\n")
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert session.usage() == cgroup.Counters(1234, 4096, 8192, 7, 2)


def test_v2_without_memory_peak_reports_none_for_it(v2: FakeCgroup2) -> None:
    v2.hidden = {"memory.peak"}
    hierarchy = v2.detect().prepare()
    assert hierarchy.capabilities["memory_peak"] == cgroup.Capability(
        False, "", "this kernel has no memory.peak"
    )
    assert hierarchy.create("s1").usage().memory_peak_bytes is None


def test_v2_swap_file_may_be_missing(v2: FakeCgroup2) -> None:
    v2.hidden = {"memory.swap.max"}
    v2.detect().prepare().create("s1").limit(memory=1 << 20)
    assert not (v2.root / "sandkeep/s1/memory.swap.max").exists()


def test_v2_kill_freeze_and_attach_write_the_core_files(v2: FakeCgroup2) -> None:
    session = v2.detect().prepare().create("s1")
    group = v2.root / "sandkeep/s1"
    session.attach(42)
    assert (group / "cgroup.procs").read_text() == "42\n"
    (group / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    session.freeze(1.0)
    assert (group / "cgroup.freeze").read_text()[0] == "1"
    session.thaw()
    assert (group / "cgroup.freeze").read_text()[0] == "0"
    assert session.populated()
    session.kill()
    assert (group / "cgroup.kill").read_text() == "1"
    descriptor = session.cgroup2_fd()
    assert os.path.samestat(os.fstat(descriptor), group.stat())
    os.close(descriptor)


def test_v2_freeze_that_times_out_thaws_again(v2: FakeCgroup2) -> None:
    session = v2.detect().prepare().create("s1")
    with pytest.raises(TimeoutError):
        session.freeze(0.02)
    assert (v2.root / "sandkeep/s1/cgroup.freeze").read_text()[0] == "0"


def test_v2_process_groups_nest_and_go_with_the_session(v2: FakeCgroup2) -> None:
    session = v2.detect().prepare().create("s1")
    nested = session.process_group("p1")
    nested.enter(77)
    assert (v2.root / "sandkeep/s1/p1/cgroup.procs").read_text() == "77\n"
    assert nested.pids() == [77]
    assert session.process_group("p1").path == nested.path
    session.remove()
    assert not (v2.root / "sandkeep").exists(), "the group above goes with its last session"


def test_the_group_above_stays_while_another_session_is_there(v2: FakeCgroup2) -> None:
    hierarchy = v2.detect()
    first, second = hierarchy.create("a"), hierarchy.create("b")
    first.remove()
    assert hierarchy.leftovers() == ["b"]
    second.remove()
    assert hierarchy.leftovers() == []


def test_v2_daemon_moves_itself_into_a_leaf(v2: FakeCgroup2) -> None:
    v2.group("service", subtree="")
    (v2.root / "cgroup.subtree_control").write_text("memory pids cpu")
    own = v2.place("/service")
    (own / "cgroup.controllers").write_text("memory pids cpu")
    (own / "cgroup.procs").write_text("10\n11\n")
    hierarchy = v2.detect().prepare([10, 11])
    assert sorted((own / cgroup.LEAF / "cgroup.procs").read_text().split()) == ["10", "11"]
    assert (own / "cgroup.procs").read_text() == ""
    assert usable(hierarchy) == set(cgroup.CAPABILITIES)
    # A process started from the leaf puts sessions where the daemon does.
    hierarchy.create("s1")
    v2.place(f"/service/{cgroup.LEAF}")
    assert v2.detect().leftovers() == ["s1"]


def test_v2_shared_group_uses_the_one_above_when_that_passes_controllers_on(v2: FakeCgroup2) -> None:
    (v2.root / "cgroup.subtree_control").write_text("memory pids cpu")
    v2.group("user.slice", subtree="memory pids")
    own = v2.group("user.slice/session-1.scope")
    v2.place("/user.slice/session-1.scope")
    (own / "cgroup.procs").write_text("10\n99\n")
    assert v2.detect().preparable([10]) == ["memory", "pids"]
    hierarchy = v2.detect().prepare([10])
    assert {"memory", "pids", "oom"} <= usable(hierarchy)
    assert "cpu" not in usable(hierarchy)
    hierarchy.create("s1")
    assert (v2.root / "user.slice/sandkeep/s1/memory.max").exists()
    assert (own / "cgroup.procs").read_text() == "10\n99\n", "nobody was moved"


def test_v2_shared_group_with_nothing_above_says_who_is_in_the_way(v2: FakeCgroup2) -> None:
    v2.group("scope")
    own = v2.place("/scope")
    (own / "cgroup.controllers").write_text("memory pids cpu")
    (own / "cgroup.procs").write_text("10\n98\n99\n")
    assert v2.detect().preparable([10]) == []
    hierarchy = v2.detect().prepare([10])
    assert "2 process(es) that are not ours" in hierarchy.capabilities["memory"].why
    assert "Delegate=yes" in hierarchy.capabilities["memory"].why
    session = hierarchy.create("s1")
    with pytest.raises(LimitUnenforceable) as caught:
        session.limit(memory=1 << 20)
    assert caught.value.part == "memory"
    assert "not ours" in caught.value.why


@pytest.mark.parametrize("hidden", [False, True], ids=["PID 1 is seen", "PID 1 is hidden"])
def test_v2_a_services_own_group_is_left_as_systemd_needs_it(v2: FakeCgroup2, hidden: bool) -> None:
    own = v2.service("system.slice/sandkeep.service")
    if hidden:
        v2.first.unlink()
    assert set(v2.detect().preparable([10, 11])) == {"memory", "pids", "cpu"}
    hierarchy = v2.detect().prepare([10, 11])
    assert (own / "cgroup.subtree_control").read_text() == "", "or systemd could not start the service again"
    assert (own / "cgroup.procs").read_text() == "10\n11\n"
    # The group above passes controllers on, and root may use it.
    hierarchy.create("s1")
    assert (v2.root / "system.slice/sandkeep/s1/memory.max").exists()
    assert usable(hierarchy) == set(cgroup.CAPABILITIES)


def test_v2_a_service_with_nothing_above_runs_without_limits_and_says_why(v2: FakeCgroup2) -> None:
    own = v2.service("sandkeep.service")
    (v2.root / "cgroup.subtree_control").write_text("")
    (own / "cgroup.controllers").write_text("memory pids cpu")
    assert v2.detect().preparable([10, 11]) == []
    hierarchy = v2.detect().prepare([10, 11])
    assert (own / "cgroup.subtree_control").read_text() == ""
    assert "cannot start the service again" in hierarchy.capabilities["memory"].why
    assert {"freeze", "kill", "process_groups"} <= usable(hierarchy)


def test_v2_a_service_whose_processes_systemd_puts_into_the_leaf_is_prepared(v2: FakeCgroup2) -> None:
    own = v2.service("system.slice/sandkeep.service", pids="")
    v2.group(f"system.slice/sandkeep.service/{cgroup.LEAF}")
    v2.place(f"/system.slice/sandkeep.service/{cgroup.LEAF}")
    hierarchy = v2.detect().prepare([10])
    assert (own / "cgroup.subtree_control").read_text() == "cpu memory pids"
    assert usable(hierarchy) == set(cgroup.CAPABILITIES)


@pytest.mark.parametrize("first", ["0::/\n", "0::/a.slice/docker-1.scope\n", "0::/../../init.scope\n"])
def test_v2_a_groups_name_means_nothing_where_systemd_does_not_run(v2: FakeCgroup2, first: str) -> None:
    own = v2.service("system.slice/sandkeep.service")
    v2.first.write_text(first)
    v2.detect().prepare([10, 11])
    assert (own / "cgroup.subtree_control").read_text() == "cpu memory pids"


def test_v2_a_scope_is_prepared_and_groups_in_older_scopes_are_found(v2: FakeCgroup2) -> None:
    for name in ("sandkeep-1-aa.scope", "sandkeep-2-bb.scope"):
        v2.service(f"system.slice/{name}")
        v2.detect().prepare([10, 11]).create("old")
    own = v2.service("system.slice/sandkeep-1-cc.scope")
    hierarchy = v2.detect().prepare([10, 11])
    assert (own / "cgroup.subtree_control").read_text() == "cpu memory pids"
    hierarchy.create("new")
    (found,) = hierarchy.beside("sandkeep-1-")
    assert found.name == "old"
    assert found.paths() == [str(v2.root / "system.slice/sandkeep-1-aa.scope/sandkeep/old")]
    found.remove()
    assert hierarchy.beside("sandkeep-1-") == []
    assert (v2.root / "system.slice/sandkeep-2-bb.scope/sandkeep/old").exists()


def test_v2_the_tightest_limit_of_all_groups_above_is_named(v2: FakeCgroup2) -> None:
    own = v2.service("system.slice/sandkeep.service/more")
    (own / "pids.max").write_text("9000\n")
    assert v2.detect().ceilings() == {"pids": (9000, str(own))}
    (own.parent / "pids.max").write_text("3552\n")
    (own.parent.parent / "memory.max").write_text("1073741824\n")
    assert v2.detect().ceilings() == {
        "pids": (3552, str(own.parent)),
        "memory": (1 << 30, str(own.parent.parent)),
    }


@pytest.mark.parametrize(
    ("path", "unit", "of_system", "of_user"),
    [
        ("/system.slice/sandkeep.service", "/system.slice/sandkeep.service", "system.slice", ""),
        ("/a.slice/a-b.slice/s.service/sandkeep-host", "/a.slice/a-b.slice/s.service", "a-b.slice", ""),
        ("/user.slice/user-0.slice/session-1.scope", "/user.slice/user-0.slice/session-1.scope", "", ""),
        (
            "/user.slice/user-7.slice/user@7.service/app.slice/s.service",
            "/user.slice/user-7.slice/user@7.service/app.slice/s.service",
            "",
            "app.slice",
        ),
        ("/", "", "", ""),
    ],
)
def test_units_and_slices_are_read_off_a_path(path: str, unit: str, of_system: str, of_user: str) -> None:
    assert units.unit_of(path) == unit
    assert units.slice_of(path) == of_system
    assert units.slice_of(path, user=7) == of_user


def test_session_found_again_by_name_and_by_record(v2: FakeCgroup2) -> None:
    hierarchy = v2.detect().prepare()
    session = hierarchy.create("s1")
    assert v2.detect().open("s1").paths() == session.paths()
    v2.group("elsewhere")
    v2.place("/elsewhere")
    other = v2.detect()
    with pytest.raises(NotFound):
        other.open("s1")
    assert other.open("s1", session.record()).paths() == session.paths()


def test_creating_a_name_twice_is_refused(v2: FakeCgroup2) -> None:
    hierarchy = v2.detect()
    hierarchy.create("s1")
    with pytest.raises(FileExistsError):
        hierarchy.create("s1")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\nb"])
def test_names_that_are_not_one_directory_are_refused(v2: FakeCgroup2, name: str) -> None:
    with pytest.raises(InvalidRequest):
        v2.detect().create(name)


@pytest.mark.parametrize("limit", [{"memory": 0}, {"pids": -1}, {"cpu": 0.0}])
def test_limits_must_be_positive(v2: FakeCgroup2, limit: dict[str, int]) -> None:
    session = v2.detect().prepare().create("s1")
    with pytest.raises(InvalidRequest) as caught:
        session.limit(**limit)
    assert caught.value.field in limit


def test_no_control_groups_at_all_is_a_layout_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text("23 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    (tmp_path / "own").write_text("")
    hierarchy = cgroup.detect(str(tmp_path / "mountinfo"), str(tmp_path / "own"))
    assert hierarchy.layout == "none"
    assert usable(hierarchy) == set()
    session = hierarchy.create("s1")
    session.attach(1)
    assert session.cgroup2_fd() == -1
    assert session.usage() == cgroup.Counters(None, None, None, None, None)
    with pytest.raises(HostCannot) as caught:
        session.freeze(1)
    assert caught.value.part == "freeze"
    session.remove()


@pytest.mark.parametrize(
    ("mount_root", "own", "expected"),
    [
        ("/", "/", ""),
        ("/", "/a/b", "/a/b"),
        ("/docker/1", "/docker/1", ""),
        ("/docker/1", "/docker/1/x", "/x"),
        ("/docker/1", "/docker/12", None),
        ("/", "/../outside", None),
    ],
)
def test_own_group_below_a_mount_that_shows_part_of_the_hierarchy(
    v2: FakeCgroup2, mount_root: str, own: str, expected: str | None
) -> None:
    v2.mountinfo.write_text(f"41 31 0:38 {mount_root} {v2.root} rw - cgroup2 cgroup2 rw\n")
    v2.own.write_text(f"0::{own}\n")
    current = ""
    for part in (expected or "").strip("/").split("/"):
        current = f"{current}/{part}".strip("/")
        if current:
            v2.group(current)
    hierarchy = v2.detect()
    if expected is None:
        assert hierarchy.layout == "none"
    else:
        assert hierarchy.create("s1").paths() == [f"{v2.root}{expected}/sandkeep/s1"]


def test_mount_points_with_spaces_are_understood(v2: FakeCgroup2, tmp_path: Path) -> None:
    spaced = tmp_path / "control groups"
    spaced.symlink_to(v2.root)
    escaped = str(spaced).replace(" ", "\\040")
    v2.mountinfo.write_text(f"41 31 0:38 / {escaped} rw - cgroup2 cgroup2 rw\n")
    assert v2.detect().layout == "v2"
