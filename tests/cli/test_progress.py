"""Signs of life while something takes a while: on a terminal only, gone at the end, and not when unwanted."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sandkeep.host.images.oci import own_platform
from tests.cli.program import Program
from tests.cli.relay import slow
from tests.host.rootfs_runner import OciImage
from tests.host.test_images_registry import running_registry
from tests.server.server_process import ServerProcess
from tests.server.test_images import runnable

ERASED = b"\r\033[K"


@contextmanager
def far_away(server: ServerProcess, *, rate: int) -> Iterator[Program]:
    """The program, with a slow line to its server."""
    parts = urlsplit(server.url)
    assert parts.hostname is not None and parts.port is not None
    with slow((parts.hostname, parts.port), rate=rate) as port:
        yield Program({"SANDKEEP_URL": f"http://127.0.0.1:{port}", "SANDKEEP_TOKEN": server.token})


def drawn(output: bytes, words: str) -> bool:
    """Whether something was shown, and nothing is left of it on the line."""
    _, shown, after = output.partition(words.encode())
    return bool(shown) and ERASED in after and words.encode() not in after.rpartition(ERASED)[2]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    root = tmp_path / "large"
    root.mkdir()
    for number in range(8):
        (root / f"part-{number}").write_bytes(os.urandom(1 << 20))
    return root


def test_copies_both_ways_show_how_far_they_are(
    server: ServerProcess, box: str, large: Path, tmp_path: Path
) -> None:
    with far_away(server, rate=8 << 20) as cli:
        up = cli.on_terminal("cp", str(large), f"{box}:/tmp/large")
        assert drawn(up, "Sending /") and "━".encode() in up and b"of 8.0 MiB" in up
        assert b"8 files" in up.rpartition(ERASED)[2]
        down = cli.on_terminal("cp", f"{box}:/tmp/large", str(tmp_path / "back"))
        assert drawn(down, "Fetching /tmp/large") and b"MiB/s" in down
        quiet = cli.on_terminal("cp", "--quiet", str(large / "part-0"), f"{box}:/tmp/large")
        assert quiet == b""
        assert b"\033" not in cli.on_terminal("cp", "--json", f"{box}:/tmp/large", str(tmp_path / "again"))
        assert cli("cp", str(large), f"{box}:/tmp/large").err.count("\n") == 1


def test_progress_is_shown_until_the_server_has_everything(
    server: ServerProcess, box: str, tmp_path: Path
) -> None:
    (tmp_path / "small").write_bytes(os.urandom(256 << 10))  # which every buffer on the way holds whole
    with far_away(server, rate=256 << 10) as cli:
        assert drawn(cli.on_terminal("cp", str(tmp_path / "small"), f"{box}:/tmp/small"), "Sending /")


def test_a_pull_shows_how_far_it_is(local: Program, name: str, tmp_path: Path) -> None:
    image = OciImage(architecture=own_platform().partition("/")[2])
    with io.BytesIO() as packed:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            entry = tarfile.TarInfo("large")
            entry.size = 8 << 20
            archive.addfile(entry, io.BytesIO(os.urandom(entry.size)))
        image.add(packed.getvalue())
    with running_registry(str(tmp_path / "registry"), password=False) as registry:
        registry.push(name, "1", image)
        host, _, port = registry.address.rpartition(":")
        with slow((host, int(port)), rate=5 << 20) as near:
            reference = f"127.0.0.1:{near}/{name}:1"
            shown = local.on_terminal("images", "pull", "--insecure", reference)
    assert drawn(shown, "Pulling 127.0.0.1") and "━".encode() in shown
    local("images", "rm", reference)


def test_a_missing_image_is_pulled_when_a_sandbox_is_created(
    local: Program, name: str, tmp_path: Path
) -> None:
    with running_registry(str(tmp_path / "registry"), password=False) as registry:
        reference = f"{registry.address}/{name}:1"
        registry.push(name, "1", runnable(**{"etc/mark": b"first"}))
        shown = ("run", "--image", reference, "--", "cat", "/etc/mark")
        local.fails("run", "--pull", "never", *shown[1:], status=125)
        assert local(*shown).out == b"first"
        kept = ("run", "--name", f"{name}-kept", "--stop")
        assert local(*kept, *shown[1:]).out == b"first"
        registry.push(name, "1", runnable(**{"etc/mark": b"second"}))
        assert local(*shown).out == b"first"
        assert local("run", "--pull", "always", *shown[1:]).out == b"second"
    assert local(*shown).out == b"second"
    assert local(*kept, "--", "cat", "/etc/mark").out == b"first"  # by digest, whatever the tag means now
    local("rm", f"{name}-kept")
    local("images", "rm", reference)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["create", "--name"], "Creating"),
        (["checkpoint"], "Taking a checkpoint of"),
        (["snapshot", "--stop"], "Taking a snapshot of"),
        (["rm"], "Removing"),
    ],
)
def test_work_of_unknown_length_is_named(
    server: ServerProcess, cli: Program, name: str, args: list[str], said: str
) -> None:
    if args[0] != "create":
        cli("create", "-q", "--name", name)
    with far_away(server, rate=2000) as slowly:
        assert drawn(slowly.on_terminal(*args, name), f"{said} {name}")
    if args[0] != "rm":
        cli("rm", "--delete-orphan-snapshots", name)


def test_colours_are_left_out_when_they_are_not_wanted(cli: Program, box: str) -> None:
    lines = ("ls", "--name-prefix", box)
    assert b"\033[32mrunning" in cli.on_terminal(*lines)
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert b"\033" not in cli.on_terminal(*lines, env=env)


def test_a_terminal_that_cannot_erase_a_line_is_shown_none(server: ServerProcess, name: str) -> None:
    with far_away(server, rate=2000) as slowly:
        assert b"\r\033" not in slowly.on_terminal("create", "--name", name, env={"TERM": "dumb"})
        slowly("rm", name)


def test_errors_are_coloured_unless_unwanted(cli: Program) -> None:
    assert b"\033[31msandkeep:" in cli.on_terminal("stop", "no-such-sandbox", status=1)
    assert b"\033[31m" not in cli.on_terminal("stop", "no-such-sandbox", status=1, env={"NO_COLOR": "1"})
