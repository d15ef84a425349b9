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
from sandkeep.linux.cgroup import groupfs

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
        return cgroup.detect(str(self.mountinfo), str(self.own))


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
    assert session.usage() == cgroup.Usage(1234, 4096, 8192, 7, 2)


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
    assert session.usage() == cgroup.Usage(None, None, None, None, None)
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
