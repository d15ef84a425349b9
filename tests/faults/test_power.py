"""Power goes at any instant: the server starts again, and every snapshot reported synced is intact."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandkeep.engine import keys
from sandkeep.linux import syscalls
from sandkeep.sync import Client
from tests.faults import power
from tests.faults.recorded_disk import Instant, RecordedDisk, Replay, make_disk, mounted, read_log
from tests.polling import until

pytestmark = pytest.mark.skipif(power.missing() is not None, reason=str(power.missing()))

INSTANTS = int(os.environ.get("SANDKEEP_POWER_INSTANTS", "40"))


def _sync(place: Path) -> None:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        syscalls.syncfs(fd)
    finally:
        os.close(fd)


def test_a_recorded_disk_keeps_what_was_flushed_and_may_lose_the_rest(tmp_path: Path) -> None:
    """The harness itself: what was synced is on every later disk, what was not is on the last one only."""
    base = tmp_path / "base"
    make_disk(base, "ext4", 64 << 20)
    disk = RecordedDisk(tmp_path, base)
    with disk.mounted(tmp_path / "m"):
        (tmp_path / "m/synced").write_bytes(b"a" * 300_000)
        _sync(tmp_path / "m")
        synced = disk.position()
        (tmp_path / "m/unsynced").write_bytes(b"b" * 300_000)
        assert disk.position() == synced, "nothing was to be written yet"
    entries = read_log(disk.log, disk.position())
    flushed = sum(1 for entry in entries if entry.at + entry.size <= synced)
    assert any(entry.offset is None for entry in entries[2:flushed]), "no flush got through"
    replay = Replay(base, disk.log, entries)
    for entry, kept, expected in ((flushed, 0.0, {"synced"}), (len(entries), 1.0, {"synced", "unsynced"})):
        replay.disk(Instant(entry, kept, 0), tmp_path / "after")
        with mounted(tmp_path / "after", tmp_path / "m"):
            assert {path.name for path in (tmp_path / "m").iterdir()} == {"lost+found", *expected}
            assert (tmp_path / "m/synced").read_bytes() == b"a" * 300_000
    replay.close()


def test_a_key_is_on_disk_before_anything_is_sealed_with_it(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_disk(base, "ext4", 64 << 20)
    disk = RecordedDisk(tmp_path, base)
    with disk.mounted(tmp_path / "m"):
        key = keys.derive(str(tmp_path / "m"), "tests")
        entries = read_log(disk.log, disk.position())
    replay = Replay(base, disk.log, entries)
    replay.disk(Instant(len(entries), 0.0, 0), tmp_path / "after")
    replay.close()
    with mounted(tmp_path / "after", tmp_path / "m"):
        assert keys.derive(str(tmp_path / "m"), "tests") == key


def _fsync_another_file(place: Path) -> None:
    """Have the filesystem's journal written, and with it what happened to names, but no other file's data."""
    with open(place / "another", "wb") as another:
        another.write(b"x")
        another.flush()
        os.fsync(another.fileno())


def test_a_layer_is_deleted_once_the_store_can_not_name_it_again(tmp_path: Path) -> None:
    """Back to an older snapshot, the newer one deleted: the sandbox does not stand on what is gone."""

    def use(client: Client, place: Path) -> None:
        box = client.create_sandbox("box", destroy=False)
        box.fs.write_text("file", "older")
        older = box.snapshot()
        box.resume()
        box.fs.write_text("file", "newer")
        newer = box.snapshot()
        until(lambda: all(found.synced_at for found in box.snapshots()))
        [held] = (place / "data/layers").glob(f"*/refs/{newer.id}")
        box.rollback(older)
        client.delete_snapshot(newer.id)
        until(lambda: not held.parent.parent.exists())
        _fsync_another_file(place)

    with power.after_a_cut(tmp_path, use) as client:
        assert client.resume_sandbox("box").fs.read_text("file") == "older"


def test_every_start_succeeds_and_every_synced_snapshot_is_intact(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("p")
    lines: list[str] = []
    found = power.run(directory, instants=INSTANTS, seconds=20, say=lines.append)
    print(*lines, sep="\n")
    assert not found.violations, "\n".join(lines)
    assert found.instants == found.starts == INSTANTS
    assert found.checked > INSTANTS and found.intact == found.checked
    assert found.resumed > INSTANTS
