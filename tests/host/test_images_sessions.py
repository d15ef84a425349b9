"""Images in real sessions: the checklist asked from inside, with every barrier in place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.driver_lab import Box, Lab
from tests.host import rootfs_runner
from tests.mode_runner import MODES, Ask, everywhere, opened

CHECKLIST = Path(__file__).with_name("rootfs_checklist.sh")


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def holds(box: Box, *programs: str) -> None:
    ran = box.run("sh", "-c", CHECKLIST.read_text(), "checklist", *programs)
    assert (ran.code, ran.stdout) == (0, ""), ran.output


@everywhere
def test_the_host_image_holds_what_clients_rely_on(lab: Lab) -> None:
    also = [name for name in ("git", "node", "npm", "apt-get") if shutil.which(name, path="/usr/bin")]
    box = lab.box()
    holds(box, "python", "python3", *also)
    box.remove()


@everywhere
def test_sudo_keeps_the_process_and_its_exit_code(lab: Lab) -> None:
    box = lab.box()
    assert box.sh("sudo sh -c 'kill -TERM $$'").code == 128 + 15
    assert box.sh("exec sudo sh -c 'exit 3'").code == 3
    box.remove()


@everywhere
def test_the_images_own_home_and_working_directory_are_the_sessions(lab: Lab) -> None:
    shell = Path(rootfs_runner.require_program("busybox")).read_bytes()
    links: dict[str, Any] = {f"bin/{name}": ("sym", "busybox") for name in ("sh", "id", "cat")}
    packed = rootfs_runner.tar_of({"bin/busybox": shell, **links, "srv/app/file": b"there"}, mode=0o755)
    config = {"WorkingDir": "/srv/app", "Env": ["HOME=/data/home"]}
    made = rootfs_runner.OciImage(config=config).add(packed)
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        path = rootfs_runner.write_layout(f"{place}/layout", {"one": made})
        lab.do(lab.storage.import_image(path, kind="oci-layout", name="chosen"))
    box = lab.box(image="chosen")
    script = "echo $HOME; pwd; cat file; echo; echo new > file2; cd && echo settings > .rc && pwd"
    ran = box.run("sh", "-c", script)
    assert ran.stdout == "/data/home\n/srv/app\nthere\n/data/home\n", ran.output
    as_root = box.run("sh", "-c", "echo $HOME", root=True)
    assert as_root.stdout == "/root\n"
    box.remove()


@pytest.mark.root
def test_a_debian_holds_what_clients_rely_on_and_survives_a_snapshot(test_area: Path) -> None:
    source = rootfs_runner.debian_rootfs("libcap2-bin")
    data = f"{test_area}/images-debian"
    with Lab(data) as lab:
        lab.do(lab.storage.import_image(source, kind="tar", name="debian:test"))
        box = lab.box(image="debian:test")
        holds(box, "python", "python3", "apt-get")
        box.sh("sudo useradd -m bob && sudo cp /bin/true /opt/t && sudo setcap cap_net_raw=ep /opt/t")
        box.stop()
        box.publish("lay1")
        again = lab.box(image="debian:test", layer="lay1")
        assert again.sh("id -un bob; getcap /opt/t").stdout == "bob\n/opt/t cap_net_raw=ep\n"
        holds(again)
    shutil.rmtree(data)
    assert os.path.exists(source)
