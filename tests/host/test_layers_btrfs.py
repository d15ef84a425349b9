"""A data directory that is a subvolume: checkpoint by snapshot; on a real btrfs in a loop device."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep.host.layers import LayerStore
from sandkeep.host.layers.btrfs import create_data_directory
from sandkeep.host.remover import Remover
from sandkeep.linux import btrfs
from sandkeep.supervisor.checkpoint import copy_upper
from tests.host.overlay_mounts import Fixture, listing, mounted

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mkfs.btrfs") is None or not os.path.exists("/dev/loop-control"),
    reason="makes and mounts a btrfs image: needs root, mkfs.btrfs and loop devices",
)


@pytest.fixture(scope="module")
def btrfs_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("btrfs")
    image, target = directory / "image", directory / "mnt"
    with open(image, "wb") as handle:
        handle.truncate(256 << 20)
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True)
    target.mkdir()
    made = subprocess.run(["mount", "-o", "loop", str(image), str(target)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount btrfs here: {made.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


@pytest.fixture
def fixture(btrfs_mount: Path, request: pytest.FixtureRequest) -> Fixture:
    data = btrfs_mount / request.node.name
    assert create_data_directory(str(data))
    return Fixture(data)


@pytest.fixture
def store(fixture: Fixture) -> LayerStore:
    return LayerStore(str(fixture.data), flavour="trusted")


def test_a_checkpoint_is_a_snapshot_of_the_instant(fixture: Fixture, store: LayerStore) -> None:
    """What is written before the freeze is in it, what comes after the thaw is not, and no snapshot stays."""
    (fixture.image / "gone").touch()
    directory = fixture.session("s")
    calls: list[str] = []
    with mounted([str(fixture.image)], str(directory / "fs/root"), str(directory / "work/root")) as root:
        Path(root, "file").write_text("before")
        os.unlink(f"{root}/gone")

        def freeze() -> None:
            calls.append("freeze")
            Path(root, "late").write_text("just before")

        def thaw() -> None:
            calls.append("thaw")
            Path(root, "file").write_text("after")

        report = copy_upper(
            str(directory / "fs"),
            store.copy_directory("one"),
            freeze=freeze,
            thaw=thaw,
            cancelled=lambda: False,
        )
    assert calls == ["freeze", "thaw"]
    assert report.passes == 1
    store.adopt(layer="one", parent=None, image="base")
    assert sorted(os.listdir(fixture.data / "layers/one")) == [
        "fs",
        "meta.copy.json",
        "meta.json",
        "released",
    ]
    view = fixture.view(store.compose(fixture.rootfs, "one"))
    assert {name: view[name][5] for name in view} == {"file": b"before", "late": b"just before"}


def test_a_snapshot_left_by_a_crash_is_removed(fixture: Fixture, store: LayerStore) -> None:
    copy = store.copy_directory("one")
    parent, source = (os.open(path, os.O_RDONLY) for path in (os.path.dirname(copy), fixture.data))
    try:
        btrfs.snapshot(source, parent, b"snapshot")
    finally:
        os.close(parent)
        os.close(source)
    store.recover()
    assert sorted(os.listdir(fixture.data / "layers")) == [".lock", ".lock-fold"]


def test_files_of_different_layers_never_pass_for_one(fixture: Fixture, store: LayerStore) -> None:
    """They would if each layer were a subvolume, where inode numbers start again."""
    for number in (1, 2, 3):
        parent = f"g{number - 1}" if number > 1 else None
        upper = fixture.session(f"s{number}", parent) / "fs/root"
        (upper / f"file{number}").write_text(str(number))
        store.publish(f"s{number}", layer=f"g{number}", parent=parent, image="base")
    lowers = [lower.path for lower in store.compose(fixture.rootfs, "g3").slots[0].lowers]
    with mounted(lowers) as root:
        seen = {(s.st_dev, s.st_ino) for s in (os.lstat(f"{root}/file{n}") for n in (1, 2, 3))}
    assert len(seen) == 3


def test_large_files_are_cloned(btrfs_mount: Path) -> None:
    """A copy in a plain directory shares its data."""
    source, dest = btrfs_mount / "cloned/source", btrfs_mount / "cloned/dest"
    source.mkdir(parents=True)
    (source / "large").write_bytes(os.urandom(32 << 20))
    subprocess.run(["sync", "-f", str(source)], check=True)
    used = os.statvfs(btrfs_mount)
    report = copy_upper(
        str(source), str(dest), freeze=lambda: None, thaw=lambda: None, cancelled=lambda: False
    )
    assert report.passes == 3
    assert listing(str(source)) == listing(str(dest))
    subprocess.run(["sync", "-f", str(source)], check=True)
    now = os.statvfs(btrfs_mount)
    assert (used.f_bfree - now.f_bfree) * used.f_bsize < 8 << 20


def test_a_data_directory_is_removed_with_the_subvolumes_in_it(fixture: Fixture) -> None:
    (fixture.data / "layers").mkdir(exist_ok=True)
    inside = os.open(fixture.data / "layers", os.O_RDONLY)
    try:
        btrfs.create_subvolume(inside, b"snapshot")
    finally:
        os.close(inside)
    (fixture.data / "layers" / "snapshot" / "file").write_text("left by a checkpoint")
    with Remover() as remover:
        assert remover.remove(str(fixture.data), last=()) == []
    assert not fixture.data.exists()
