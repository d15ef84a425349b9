"""Overlays mounted every way there is: sessions look and keep the same, and nothing is left attached."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandkeep.errors import LayerError
from sandkeep.host.driver import SessionRef, SessionSpec
from sandkeep.host.images.view import View
from sandkeep.host.native.mounts import Builder
from sandkeep.host.reports import Enforcement
from sandkeep.host.rootfs import Bind, Lower, Slot
from sandkeep.linux import overlay
from sandkeep.linux.overlay import HOW, WAYS, Way
from tests.driver_lab import Box, Lab, created
from tests.host.overlay_mounts import run_forked
from tests.mode_runner import BOTH_WAYS, Ask, everywhere, opened

# The newest way is what every other test of sessions uses.
_EVERYDAY = "root/names"


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=() if case == _EVERYDAY else pytest.mark.slow) for case in BOTH_WAYS],
)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def _ok(box: Box, script: str) -> str:
    result = box.sh(f"set -eu; {script}", root=True)
    assert result.code == 0, (script, result.stdout, result.stderr)
    return result.stdout


def _kept(box: Box, layer: str, parent: str | None = None) -> None:
    """Stop, publish, remove: what is left of the session is its layer."""
    box.stop()
    box.lab.do(box.lab.driver.forget(box.ref))
    box.publish(layer, parent=parent)
    box.remove()


def _all_deleted(lab: Lab) -> None:
    lab.do(lab.storage.collect_layers())
    assert lab.do(lab.storage.list_layers()) == []


def _session(lab: Lab, name: str, slots: tuple[Slot, ...] = (), binds: tuple[Bind, ...] = ()) -> Box:
    """A session with more than the image's slots and binds."""
    rootfs, _ = lab.do(lab.storage.rootfs("host"))
    rootfs = replace(rootfs, slots=(*rootfs.slots, *slots), binds=(*rootfs.binds, *binds))
    spec = SessionSpec(session=name, rootfs=rootfs)
    box = Box(lab, SessionRef(lab.driver.host, name), created(lab.do(lab.driver.create(spec))), rootfs)
    lab.boxes.append(box)
    return box


def _mounts_of(pid: int | None) -> list[str]:
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return sorted(" ".join(line.split(" ")[3:]) for line in lines)


# --- sessions -------------------------------------------------------------------------------------------

_CHANGES = """
mkdir -p /srv/d/e /srv/gone; echo one > /srv/d/e/f; echo x > /srv/gone/x
rm /etc/profile; rm -r /srv/gone; mkdir /srv/gone; echo new > /srv/gone/new
"""
_SEEN = "one\nnew\nno-profile\n"
_LOOK = "cat /srv/d/e/f /srv/gone/new; test ! -e /etc/profile && echo no-profile"


@everywhere
def test_files_of_a_session_are_kept_and_shown_again_by_the_other_way(lab: Lab) -> None:
    """A chain of layers does not know how it was mounted: made one way, used and folded the other way."""
    assert lab.driver.way is not None
    box = lab.box()
    assert box.created.barriers["root-filesystem"] == Enforcement("in force", how=HOW[lab.driver.way])
    _ok(box, _CHANGES)
    _kept(box, "first")
    other: Way = "names" if lab.driver.way == "descriptors" else "descriptors"
    with Lab(lab.data_dir, lab.driver.mode, other) as there:
        heir = there.box(name="heir", layer="first")
        assert heir.created.barriers["root-filesystem"].how == HOW[other]
        assert _ok(heir, _LOOK) == _SEEN
        _ok(heir, "echo two >> /srv/d/e/f; rm -r /srv/gone; mv /srv/d /srv/moved")
        _kept(heir, "second", "first")
    lab.do(lab.storage.hold_layer("second", "test"))
    assert lab.do(lab.storage.fold_layers("second", image="host", max_depth=1)) == 1
    again = lab.box(layer="second")
    assert _ok(again, "cat /srv/moved/e/f; ls -A /srv; test ! -e /etc/profile") == "one\ntwo\nmoved\n"
    again.remove()
    lab.do(lab.storage.release_layer("second", "test"))
    _all_deleted(lab)


@everywhere
def test_no_path_of_the_host_shows_inside(lab: Lab) -> None:
    box = lab.box()
    mounts = box.sh("cat /proc/mounts").stdout
    overlays = [line.split(" ")[3] for line in mounts.splitlines() if " overlay " in line]
    assert len(overlays) == (1 if lab.driver.mode == "root" else 2)
    assert lab.data_dir not in mounts
    if lab.driver.way == "names":
        assert all(re.search(r"lowerdir=[\d:]+,upperdir=\d+,workdir=\d+,", text) for text in overlays)
    assert box.sh("stat -c '%a %F' /dev /dev/null /dev/pts /dev/fd").stdout == (
        "755 directory\n666 character special file\n755 directory\n777 symbolic link\n"
    )
    box.remove()


@everywhere
def test_devices_are_roots_and_cannot_be_changed(lab: Lab) -> None:
    box = lab.box()
    owners = box.sh("stat -c %u:%g /dev /dev/null /dev/pts /dev/fd | sort -u", root=True).stdout
    if lab.driver.mode == "root":
        assert owners == "0:0\n"
    else:
        assert "0:0" in owners
    assert "Read-only file system" in box.sh("touch /dev/x; rm /dev/fd", root=True).stderr
    assert box.sh(
        "head -c 4 /dev/zero | wc -c; echo x > /dev/null; head -c 3 /dev/urandom | wc -c"
    ).stdout == ("4\n3\n")
    box.remove()


@everywhere
def test_drives_binds_and_read_only_slots(lab: Lab) -> None:
    """A new drive, the same one again read-only, and a directory of the host; only the first is writable."""
    shown = f"{lab.data_dir}/shown"
    os.makedirs(shown, exist_ok=True)
    Path(shown, "file").write_text("of the host\n")
    first = _session(lab, "drives", (Slot("drive0", "/data", (), drive=True),), (Bind(shown, "/mnt"),))
    _ok(first, "echo kept > /data/file")
    assert first.sh("cat /mnt/file").stdout == "of the host\n"
    assert "Read-only file system" in first.sh("touch /mnt/x", root=True).stderr
    first.stop()
    lab.do(lab.driver.forget(first.ref))
    lab.do(lab.storage.publish_slot("drives", "drive0", layer_id="drive", parent_id=None, image="drive"))
    first.remove()
    (directory,) = lab.do(lab.storage.drive_content("drive")).directories
    slot = Slot("drive0", "/data", (Lower(directory),), drive=True, read_only=True)
    second = _session(lab, "drives-again", (slot,))
    assert second.sh("cat /data/file").stdout == "kept\n"
    assert "Read-only file system" in second.sh("touch /data/x", root=True).stderr
    assert second.sh("touch /srv/x; echo $?", root=True).stdout == "0\n"
    second.remove()
    _all_deleted(lab)


@everywhere
def test_many_sessions_at_once_leave_no_mount_where_the_zygote_is(lab: Lab) -> None:
    """Overlays and clones are attached in namespaces that end; the zygote's mounts stay as they were."""
    lab.box().remove()
    zygote = lab.driver.zygote.pid
    before = _mounts_of(zygote)
    boxes = [lab.box() for _ in range(4)]
    for number, box in enumerate(boxes):
        _ok(box, f"echo {number} > /srv/mine")
    assert [_ok(box, "cat /srv/mine").strip() for box in boxes] == ["0", "1", "2", "3"]
    supervisor = boxes[0].created.supervisor_pid
    assert _mounts_of(zygote) == before == _mounts_of(supervisor)
    for box in boxes:
        box.remove()
    assert _mounts_of(zygote) == before
    assert not [line for line in before if " - overlay " in line and lab.data_dir in line]


@everywhere
def test_a_layer_that_is_missing_leaves_nothing(lab: Lab) -> None:
    before = _mounts_of(lab.driver.zygote.pid), sorted(os.listdir(f"{lab.data_dir}/sessions"))
    slot = Slot("drive0", "/data", (Lower(f"{lab.data_dir}/layers/none"),), drive=True)
    with pytest.raises(Exception, match="No such file"):
        _session(lab, "broken", (slot,))
    assert (_mounts_of(lab.driver.zygote.pid), sorted(os.listdir(f"{lab.data_dir}/sessions"))) == before


# --- many layers ----------------------------------------------------------------------------------------


def _layers(place: Path, number: int) -> list[str]:
    paths = []
    for index in range(number):
        layer = place / f"layer with a long name, a comma and a : colon {index}"
        layer.mkdir(exist_ok=True, parents=True)
        (layer / f"f{index}").write_text(str(index))
        paths.append(str(layer))
    return paths


def _count(place: Path, flavour: Any, way: Way) -> None:
    paths = _layers(place, overlay.MOST_LAYERS)
    with View(paths, flavour=flavour, way=way) as view:
        assert view.text("f0") == "0" and view.text("f499") == "499"
    cwd, mounts = os.getcwd(), Path("/proc/self/mountinfo").read_text()
    with pytest.raises(LayerError, match="too long") as refused:
        View([*paths, *_layers(place / "more", 1)], flavour=flavour, way=way)
    assert refused.value.hint == "fold it"
    with pytest.raises(FileNotFoundError):
        View([paths[0], str(place / "none")], flavour=flavour, way=way)
    assert (os.getcwd(), Path("/proc/self/mountinfo").read_text()) == (cwd, mounts)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("user_namespace", [False, True])
def test_as_many_layers_as_the_kernel_takes(tmp_path: Path, way: Way, user_namespace: bool) -> None:
    if not user_namespace and os.geteuid() != 0:
        pytest.skip("needs real root")
    flavour = "user" if user_namespace else "trusted"
    place = tmp_path / "layers"
    place.mkdir()
    for parent in (place, *place.parents):
        if parent.stat().st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | 0o755)
    place.chmod(0o777)
    run_forked(lambda: _count(place, flavour, way), user_namespace=user_namespace)


def test_options_that_do_not_fit_are_refused_before_the_kernel_cuts_them() -> None:
    stack = overlay.Stack([10**8 + number for number in range(500)], ["index=off"])
    with pytest.raises(LayerError, match="4095 is the most"):
        overlay.mount(stack, "names", "/nowhere")


def test_the_error_of_a_mount_apart_is_the_callers() -> None:
    def fail() -> None:
        raise OSError(errno.EDOM, "of the work")

    def body() -> None:
        with pytest.raises(OSError, match="of the work"):
            overlay.apart(fail)

    run_forked(body, user_namespace=os.geteuid() != 0)


@pytest.mark.root
@pytest.mark.parametrize("way", ["descriptors", "names"])
def test_a_builder_without_ids_to_map_closes_every_descriptor(tmp_path: Path, way: Way) -> None:
    """As every supervisor of an ordinary user does, which lives as long as its session."""
    (tmp_path / "layer").mkdir()
    before = os.listdir("/proc/self/fd")
    builder = Builder(str(tmp_path), userns=-1, base=0, way=way, anchor=str(tmp_path))
    assert os.path.samestat(os.fstat(builder._below_store(f"{tmp_path}/layer")), os.stat(tmp_path / "layer"))
    builder.close()
    assert os.listdir("/proc/self/fd") == before
