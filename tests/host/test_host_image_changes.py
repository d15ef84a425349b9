"""The ``host`` image of a machine whose packages change: built again until it is whole, and old ones go."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandkeep.errors import ImageError
from sandkeep.host.images import hostimage, store, tree
from sandkeep.host.images.store import ImageStore
from tests.host import rootfs_runner
from tests.server.server_process import running_server

JOURNAL = "/var/lib/dpkg/updates"
Entries = list["os.DirEntry[str]"]


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    rootfs_runner.require_root()
    if not os.path.isdir(JOURNAL):
        pytest.skip("not a Debian host")
    monkeypatch.setattr(store, "_HOST_PAUSE", 0.01)
    return ImageStore(str(tmp_path / "data"), mode="root")


@pytest.fixture
def vanishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Have dpkg's journal list a file that is gone when it is copied, so many times."""

    def arrange(times: int) -> list[str]:
        seen: list[str] = []
        real = tree._entries

        def entries(path: str) -> Entries:
            found = real(path)
            if path == JOURNAL and len(seen) < times:
                gone = tmp_path / "0005"
                gone.touch()
                found += [entry for entry in real(str(tmp_path)) if entry.name == "0005" and entry.stat()]
                gone.unlink()
                seen.append(path)
            return found

        monkeypatch.setattr(tree, "_entries", entries)
        return seen

    return arrange


def test_files_that_vanish_while_it_is_built_are_no_failure(
    images: ImageStore, vanishing: Callable[[int], list[str]]
) -> None:
    seen = vanishing(2)
    image = images.host()
    assert len(seen) == 2 and image.kind == "host"
    assert os.listdir(f"{images.directory}/build") == []


def test_it_is_of_one_state_of_the_machine(images: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = iter(["first", "before", "between", "between", "between"])
    real = hostimage.host_key()
    monkeypatch.setattr(hostimage, "host_key", lambda: next(keys, real))
    assert images.host().host_key == "between"
    assert len(os.listdir(f"{images.directory}/host")) == 1


def test_a_machine_that_does_not_come_to_rest_is_told_plainly(
    images: ImageStore, vanishing: Callable[[int], list[str]]
) -> None:
    vanishing(1000)
    with pytest.raises(ImageError, match="packages change") as refused:
        images.host()
    assert "0005" in refused.value.message
    assert refused.value.hint == "try again when the package manager is done"


def test_images_of_the_past_go_when_the_last_sandbox_that_needs_them_does() -> None:
    from sandkeep import sync

    with running_server() as server, sync.Client(f"unix://{server.socket}") as client:
        with client.create_sandbox():
            host = server.data / "images/host"
            [used] = os.listdir(host)
            ages = {"needed": 1e6, "unneeded": 1e6, "recent": 0.0}
            for name, age in ages.items():
                (host / name).mkdir()
                record = (host / used / "image.json").read_text().replace(used, name)
                (host / name / "image.json").write_text(record)
                os.utime(host / name / "image.json", (time.time() - age,) * 2)
            os.utime(host / used / "image.json")
            session = server.data / "sessions/of-earlier"
            session.mkdir()
            (session / "spec.json").write_text('{"image": "host@needed"}')
        left = ["needed", "recent", used]
        assert _settles(lambda: sorted(os.listdir(host)) == sorted(left)), os.listdir(host)
        shutil.rmtree(session)
        with client.create_sandbox():
            pass
        left.remove("needed")
        assert _settles(lambda: sorted(os.listdir(host)) == sorted(left)), os.listdir(host)


def _settles(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()
