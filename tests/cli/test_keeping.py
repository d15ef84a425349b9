"""What outlives a session: snapshots, checkpoints, sessions, drives, images."""

from __future__ import annotations

import io
import re
import shlex
import tarfile
from pathlib import Path

import pytest

from sandkeep.host.images.oci import own_platform
from tests.cli.program import Program
from tests.host.rootfs_runner import OciImage
from tests.host.test_images_registry import PASSWORD, USER, running_registry


def keep(cli: Program, box: str, text: str) -> None:
    cli("exec", box, "--", "sh", "-c", f"echo {text} > state")


def state(cli: Program, box: str) -> str:
    return cli("exec", box, "cat", "state").text.strip()


def test_snapshots_are_taken_listed_gone_back_to_and_deleted(cli: Program, box: str) -> None:
    keep(cli, box, "first")
    first = cli("snapshot", "--stop", box, "--expiration", "1d").text.split()[0]
    keep(cli, box, "second")
    second = cli("snapshot", "--stop", "--json", box).json
    assert second["method"] == "manual" and second["parentId"] == first
    listed = cli("snapshots", "ls", "--name", box, "--json").json
    assert [each["id"] for each in listed["snapshots"]] == [second["id"], first] and listed["next"] is None
    table = cli("snapshots", "list", "--name", box)
    assert first in table.text and "SOURCE SESSION" in table.text and second["sessionId"] in table.text
    assert re.search(r"^2 snapshots, \d", table.err, re.MULTILINE)
    assert "in 1 day" in cli("snapshots", "get", first).text
    assert cli("snapshots", "get", first, "--json").json["status"] == "created"
    line = cli("snapshots", "tree", box, "--json").json
    assert [node["snapshot"]["id"] for node in line["snapshots"]] == [second["id"], first]
    assert line["next"] is None
    assert f"● {second['id']}" in cli("snapshots", "tree", box).text
    assert cli("rollback", "--json", box, first).json == {"name": box, "currentSnapshotId": first}
    assert state(cli, box) == "first"
    cli("config", "current-snapshot", box, second["id"])
    assert state(cli, box) == "second"
    cli("snapshots", "rm", first)
    assert cli("snapshots", "get", first, "--json").json["status"] == "deleted"
    assert "sandkeep snapshots ls" in cli.fails("rollback", box, first)


def test_a_long_line_of_snapshots_comes_in_pages(cli: Program, box: str) -> None:
    taken = [cli("snapshot", "--stop", "--json", box).json["id"]]
    for _ in range(2):
        cli("exec", box, "true")
        taken.insert(0, cli("snapshot", "--stop", "--json", box).json["id"])
    found, words = [], ["snapshots", "tree", box, "--limit", "1"]
    for _ in taken:
        done = cli(*words)
        found += re.findall(r"[●○] (\S+)", done.text)
        *_, hint = ["", *done.err.splitlines()]
        words = shlex.split(hint.removeprefix("More results: "))[1:]
    assert found == taken and not words
    rest = cli("snapshots", "tree", box, "--limit", "2", "--cursor", taken[0], "--json").json
    assert [node["snapshot"]["id"] for node in rest["snapshots"]] == taken[1:] and rest["next"] is None
    cli("rollback", box, taken[2])
    for up in (["--descendants"], ["--sort-order", "asc"]):
        down = cli("snapshots", "tree", box, "--json", "--limit", "2", *up).json
        assert [node["snapshot"]["id"] for node in down["snapshots"]] == [taken[2], taken[1]]
        assert down["next"] == taken[1]
    cli.fails("snapshots", "tree", box, "--limit", "11", status=2)
    cli.fails("snapshots", "tree", box, "--cursor", "snap_none")


def test_a_checkpoint_lets_the_sandbox_run(cli: Program, box: str) -> None:
    keep(cli, box, "before")
    taken = cli("checkpoint", "--json", box, "--comment", "before it").json
    assert taken["comment"] == "before it"
    assert "before it" in cli("snapshots", "ls", "--name", box).text
    assert "before it" in cli("snapshots", "get", taken["id"]).text
    assert taken["method"] == "checkpoint"
    assert cli("config", "list", box, "--json").json["status"] == "running"
    keep(cli, box, "after")
    copy = cli("create", "--snapshot", taken["id"], "-q").text.strip()
    assert state(cli, copy) == "before"
    cli("rm", copy)
    assert cli("checkpoint", "--silent", box).text == ""


def test_missing_snapshots_are_reported(cli: Program, box: str) -> None:
    assert "sandkeep snapshots ls" in cli.fails("snapshots", "get", "snap_none")
    cli.fails("rollback", box, "snap_none")
    assert cli("config", "list", box, "--json").json["status"] == "running"
    assert cli("snapshots", "rm", "--json", "snap_none", status=1).json[0]["error"]["code"] == "not_found"
    assert "no snapshot yet" in cli.fails("snapshots", "tree", box)
    cli.fails("create", "--snapshot", "snap_none")


def test_sessions_are_listed(cli: Program, box: str) -> None:
    (running,) = cli("sessions", "ls", box, "--json").json["sessions"]
    assert running["status"] == "running" and running["sandbox"] == box
    cli("stop", box)
    assert "--all" in cli("sessions", "ls", box).err
    (over,) = cli("sessions", "list", box, "--all", "--json").json["sessions"]
    assert over["status"] == "stopped" and over["usage"]["duration"] > 0
    assert over["id"] in cli("sessions", "ls", box, "-a").text
    cli("exec", box, "true")
    cli("stop", box)
    both = cli("sessions", "ls", box, "-a")
    assert both.text.count("4096 MB") == 2 and "2 sessions; ended ones ran" in both.err
    cli.fails("sessions", "ls", "no-such-sandbox")


def test_drives_are_made_used_forked_and_deleted(cli: Program, name: str) -> None:
    drive = f"{name}-drive"
    made = cli("drives", "get-or-create", drive, "--max-size", "64M", "--json").json
    assert made["maxSizeBytes"] == 64 << 20
    assert cli("drives", "get-or-create", drive).text == f"{drive}\n"
    assert [
        each["name"] for each in cli("drives", "ls", "--name-prefix", drive, "--json").json["drives"]
    ] == [drive]
    assert "nothing has been written" in cli.fails("drives", "fork", drive, f"{drive}-2")
    cli("run", "--name", name, "--mount", f"{drive}:/data", "--", "sh", "-c", "echo here > /data/file")
    assert name in cli("drives", "ls").text
    cli.fails("drives", "rm", drive)
    cli.fails("create", "--mount", f"{drive}:/data")
    assert f"get-or-create {name}-none" in cli.fails("create", "--mount", f"{name}-none:/data")
    cli("stop", name)
    assert cli("drives", "fork", drive, f"{drive}-2", "--json").json["parentId"] == made["id"]
    cli.fails("drives", "fork", drive, f"{drive}-2")
    read = cli("run", "--mount", f"{drive}-2:/data:snapshot", "--", "cat", "/data/file")
    assert read.text == "here\n"
    cli("rm", name)
    gone = cli("drives", "rm", "--json", drive, f"{drive}-2", f"{drive}-3", status=1).json
    assert [("error" in each) for each in gone] == [False, False, True]


@pytest.fixture
def root_filesystem(tmp_path: Path) -> Path:
    """The least a sandbox can start from: a static shell, from the host's busybox."""
    import shutil

    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no busybox to make an image of: apt-get install busybox-static")
    root = tmp_path / "rootfs"
    for directory in ("bin", "etc", "tmp", "usr"):
        (root / directory).mkdir(parents=True)
    shutil.copy(busybox, root / "bin" / "busybox")
    for link in ("sh", "cat", "echo"):
        (root / "bin" / link).symlink_to("busybox")
    (root / "etc" / "mark").write_text("ours\n")
    return root


def test_an_image_is_imported_used_listed_and_deleted(
    cli: Program, local: Program, name: str, root_filesystem: Path
) -> None:
    made = local("images", "import", str(root_filesystem), "--name", name, "--json").json
    assert made["names"] == [name] and made["kind"] == "directory"
    assert name in cli("images", "ls").text
    assert name in [each for image in cli("images", "ls", "--json").json for each in image["names"]]
    assert cli("run", "--image", name, "--", "cat", "/etc/mark").text == "ours\n"
    assert "local user" in cli.fails("images", "import", str(root_filesystem), "--name", "other")
    assert "local user" in cli.fails("images", "rm", name)
    assert local("images", "rm", "--json", name).json == [{"name": name, "removed": True}]
    cli.fails("run", "--image", name, "true", status=125)


def test_an_image_is_pulled_with_and_without_a_password(
    local: Program, name: str, tmp_path: Path, root_filesystem: Path
) -> None:
    layer = OciImage(architecture=own_platform().partition("/")[2])
    with io.BytesIO() as packed:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(root_filesystem, ".")
        layer.add(packed.getvalue())
    with running_registry(str(tmp_path / "registry"), password=True) as registry:
        registry.push(name, "1", layer)
        reference = f"{registry.address}/{name}:1"
        local.fails("images", "pull", reference, "--insecure")
        made = local(
            "images", "pull", reference, "--insecure", "--username", USER, "--json",
            env={"SANDKEEP_PASSWORD": PASSWORD},
        ).json  # fmt: skip
    assert made["names"] == [reference] and made["kind"] == "oci"
    assert local("run", "--image", reference, "--", "cat", "/etc/mark").text == "ours\n"
    local("images", "rm", reference)


def test_an_image_that_cannot_be_pulled_is_reported(local: Program, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    local.fails("images", "import", str(tmp_path / "text"), "--name", "x")
    local.fails("images", "pull", "127.0.0.1:1/no/such:image", "--insecure")
    local.fails("images", "pull", "Not A Reference", status=2)
    assert "pull" not in local.fails("images", "rm", "no-such-image")
