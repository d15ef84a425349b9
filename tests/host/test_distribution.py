"""A distribution inside: packages, users, privileges and clones work, and survive a snapshot.

Asked in every mode, with what a rootless session cannot do asserted as much as what it can.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep.errors import HostCannot, NotFound
from tests.conftest import IS_ROOT
from tests.driver_lab import Box, Lab, Result
from tests.host import rootfs_runner
from tests.host.test_images_sessions import holds
from tests.mode_runner import MODES, Ask, everywhere, opened

_DEBIAN = "debian.tar"

_POSTINST = """#!/bin/sh
set -e
getent passwd _tool >/dev/null || useradd --system --no-create-home --shell /usr/sbin/nologin _tool
install -d -o _tool -g _tool -m 0750 /var/lib/tool
cp /usr/bin/id /usr/lib/tool/suid
chown _tool:_tool /usr/lib/tool/suid
chmod 4755 /usr/lib/tool/suid
cp /bin/true /usr/lib/tool/capable
setcap cap_net_bind_service+ep /usr/lib/tool/capable
"""


@pytest.fixture(scope="module")
def debian(test_area: Path) -> Path:
    """The archive of a Debian, where every user of the run can read it."""
    source = rootfs_runner.debian_rootfs("libcap2-bin", "git", "python3-venv")
    place = test_area / _DEBIAN
    if not place.exists():
        os.link(source, place) if os.stat(source).st_dev == os.stat(test_area).st_dev else place.write_bytes(
            Path(source).read_bytes()
        )
    return place


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    if IS_ROOT:
        request.getfixturevalue("debian")
    yield from opened(request)


def _ok(ran: Result) -> str:
    assert ran.code == 0, (ran.record.argv, ran.stdout[-2000:], ran.stderr[-2000:])
    return ran.stdout


def _image(lab: Lab) -> str:
    """The Debian image, imported when first asked for."""
    try:
        lab.do(lab.storage.get_image("debian"))
    except NotFound:
        archive = next((p / _DEBIAN for p in Path(lab.data_dir).parents if (p / _DEBIAN).exists()), None)
        if archive is None:
            pytest.skip("no Debian archive for this user: built under root only")
        lab.do(lab.storage.import_image(str(archive), kind="tar", name="debian"))
    return "debian"


# --- what is placed inside -------------------------------------------------------------------------------


def _packages() -> dict[str, bytes]:
    """Two packages: one with a user, a setuid file and a file capability, and one that depends on it."""
    built = {}
    with tempfile.TemporaryDirectory() as area:
        for name, depends in (("tool", "libcap2-bin"), ("tool-extra", "tool (= 1.0)")):
            tree = Path(area, name)
            (tree / "DEBIAN").mkdir(parents=True)
            (tree / "DEBIAN/control").write_text(
                f"Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: t <t@localhost>\n"
                f"Depends: {depends}\nDescription: made for a test\n"
            )
            (tree / f"usr/lib/{name}").mkdir(parents=True)
            (tree / f"usr/lib/{name}/data").write_text(f"{name}\n")
            if name == "tool":
                (tree / "DEBIAN/postinst").write_text(_POSTINST)
                (tree / "DEBIAN/postinst").chmod(0o755)
            command = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), f"{area}/{name}.deb"]
            subprocess.run(command, check=True, capture_output=True)
            built[f"{name}.deb"] = Path(area, f"{name}.deb").read_bytes()
    return built


def _wheel() -> bytes:
    with tempfile.TemporaryFile() as file:
        with zipfile.ZipFile(file, "w") as wheel:
            info = "greeter-1.0.dist-info"
            wheel.writestr("greeter.py", "def main():\n    print('greetings')\n")
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n")
            wheel.writestr(
                f"{info}/WHEEL",
                "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\ngreet = greeter:main\n")
            wheel.writestr(f"{info}/RECORD", "")
        file.seek(0)
        return file.read()


def _install(box: Box) -> Result:
    for name, content in _packages().items():
        box.write(f"/tmp/{name}", content)
    return box.sh(
        "DEBIAN_FRONTEND=noninteractive sudo -E apt-get install -y --no-install-recommends"
        " /tmp/tool.deb /tmp/tool-extra.deb"
    )


_LOOK_AT_PACKAGES = """
dpkg-query -W -f '${Package} ${Status}\\n' tool tool-extra
stat -c '%U %a %n' /var/lib/tool /usr/lib/tool/suid
/usr/lib/tool/suid -un
sudo getcap /usr/lib/tool/capable
"""
_PACKAGES_SEEN = """tool install ok installed
tool-extra install ok installed
_tool 750 /var/lib/tool
_tool 4755 /usr/lib/tool/suid
_tool
/usr/lib/tool/capable cap_net_bind_service=ep
"""


def _use_pip_and_git(box: Box) -> None:
    box.write("/tmp/greeter-1.0-py3-none-any.whl", _wheel())
    _ok(
        box.sh(
            """set -e
            python3 -m venv env
            env/bin/pip install --no-index /tmp/greeter-1.0-py3-none-any.whl
            git -c init.defaultBranch=main init -q origin && cd origin
            git config user.name t && git config user.email t@localhost
            echo content > file && git add file && git commit -qm first && cd ..
            git clone -q origin clone && git clone -q --bare file://$PWD/origin bare.git"""
        )
    )


_LOOK_AT_PIP_AND_GIT = "env/bin/greet; cat clone/file; git -C clone status --porcelain; git -C clone fsck"


def _next(box: Box, layer: str, image: str) -> Box:
    """Stop, publish, and a session on the layer."""
    lab = box.lab
    box.stop()
    lab.do(lab.driver.forget(box.ref))
    box.publish(layer)
    box.remove()
    return lab.box(image=image, layer=layer)


def _range(box: Box) -> str:
    return box.sh("cat /proc/self/uid_map").stdout.split()[1]


# --- claims ----------------------------------------------------------------------------------------------


def _lives_through_a_snapshot(lab: Lab, image: str) -> None:
    box = lab.box(image=image)
    if lab.driver.mode != "single":
        _ok(_install(box))
        assert _ok(box.sh(_LOOK_AT_PACKAGES)) == _PACKAGES_SEEN
        _ok(
            box.sh(
                "sudo useradd -m -s /bin/bash bob && sudo -u bob sh -c 'echo mine > ~/file; chmod 600 ~/file'"
            )
        )
        _ok(box.sh("sudo su bob -c 'id -un; cat ~/file'"))
    _use_pip_and_git(box)
    before = _range(box)
    again, spare = _next(box, f"lived-{image}", image), lab.box(image=image, layer=f"lived-{image}")
    if lab.driver.mode == "root":  # two at once have different ranges, so one of them has another than before
        assert _range(again) != _range(spare)
        if _range(again) == before:
            again, spare = spare, again
    assert _ok(again.sh(_LOOK_AT_PIP_AND_GIT)) == "greetings\ncontent\n"
    if lab.driver.mode != "single":
        assert _ok(again.sh(_LOOK_AT_PACKAGES)) == _PACKAGES_SEEN
        assert _ok(again.sh("sudo su - bob -c 'id -un; cat file'")) == "bob\nmine\n"
        assert again.sh("cat /home/bob/file").code != 0
        _ok(again.sh("sudo apt-get purge -y tool-extra tool"))
        assert again.sh("ls /usr/lib/tool/data /usr/lib/tool-extra").code != 0
        assert _ok(again.sh("dpkg --audit")) == ""
    holds(again)
    for each in (again, spare):
        each.remove()
    lab.do(lab.storage.collect_layers())


@everywhere
def test_what_was_installed_in_the_host_image_lives_through_a_snapshot(lab: Lab) -> None:
    """Packages with users, setuid files and capabilities, wheels, clones, users; then another id range."""
    needed = (Path("/usr/bin/git"), *Path("/usr/lib").glob("python3*/ensurepip"))
    if len(needed) < 2 or not needed[0].exists():
        pytest.skip("the host's own git and pip are used: apt-get install git python3-venv")
    _lives_through_a_snapshot(lab, "host")


@everywhere
def test_what_was_installed_in_a_debian_lives_through_a_snapshot(lab: Lab) -> None:
    """Packages with users, setuid files and capabilities, wheels, clones, users; then another id range."""
    _lives_through_a_snapshot(lab, _image(lab))


@everywhere
def test_programs_of_the_host_can_be_replaced_under_root_only(lab: Lab) -> None:
    """Rootless, the host's files belong to nobody inside: new ones can be added, those not changed."""
    box = lab.box()
    _ok(box.sh("sudo sh -c 'echo new > /usr/share/new; mkdir /usr/lib/fresh; cat /usr/share/new'"))
    edit = box.sh("sudo sh -c 'chmod 0700 /usr/bin/env && stat -c %a /usr/bin/env'")
    setuid = box.sh("su root -c true < /dev/null")
    owner = _ok(box.sh("stat -c %U /usr/bin/env")).strip()
    if lab.driver.mode == "root":
        assert (_ok(edit), owner) == ("700\n", "root")
        assert "Authentication failure" in setuid.stderr, "su runs with privileges, and asks"
    else:
        assert edit.code != 0 and "Operation not permitted" in edit.stderr
        assert owner == "nobody"
        # With one id the caller is root already; with a range, the setuid bit of nobody's file is ignored.
        assert (setuid.code == 0) == (lab.driver.mode == "single")
    box.remove()


@everywhere
def test_programs_of_an_image_can_be_replaced_in_every_mode(lab: Lab) -> None:
    """An image's own files belong to root inside, whoever runs the session."""
    box = lab.box(image=_image(lab))
    _ok(box.sh("sudo sh -c 'chmod 0700 /usr/bin/env && rm /usr/bin/tac && echo x >> /etc/debian_version'"))
    assert _ok(box.sh("stat -c '%U %a' /usr/bin/env")) == "root 700\n"
    box.remove()


@everywhere
def test_one_id_is_one_user(lab: Lab) -> None:
    """With a single id everybody is root: changing to another user is accepted without effect, or refused."""
    box = lab.box(image=_image(lab))
    if lab.driver.mode != "single":
        assert _ok(box.sh("id -u; sudo id -u")) == "1000\n0\n"
        assert _ok(box.sh("sudo touch /srv/f; sudo chown 33:33 /srv/f; stat -c %u:%g /srv/f")) == "33:33\n"
    else:
        assert _ok(box.sh("id -u; sudo id -u")) == "0\n0\n"
        assert _ok(box.sh("touch /srv/f; chown 33:33 /srv/f; stat -c %u:%g /srv/f")) == "0:0\n"
        _ok(box.sh("useradd -m bob"))
        assert _ok(box.sh("su bob -c 'id -u'")) == "0\n"
        assert box.sh("sudo -u bob id -u").code != 0
        for user in ("bob", "1000"):
            with pytest.raises(HostCannot, match="is root"):
                box.start("id", user=user)
        # So packages with users install, and everything they made is root's.
        _ok(_install(box))
        look = "stat -c '%U %a' /usr/lib/tool/suid; /usr/lib/tool/suid -un; getcap /usr/lib/tool/capable"
        seen = _ok(box.sh(look)).splitlines()
        assert seen == ["root 4755", "root", "/usr/lib/tool/capable cap_net_bind_service=ep"]
    box.remove()
