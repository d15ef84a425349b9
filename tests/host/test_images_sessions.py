"""Images in real sessions: the checklist asked from inside, with every barrier in place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host import imagekit
from tests.lab import Box, Lab
from tests.labs import MODES, Ask, everywhere, opened

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


@pytest.mark.root
def test_a_debian_holds_what_clients_rely_on_and_survives_a_snapshot(test_area: Path) -> None:
    source = imagekit.debian_rootfs("libcap2-bin")
    data = f"{test_area}/images-debian"
    with Lab(data) as lab:
        lab.call("image.import", kind="tar", path=source, name="debian:test")
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
