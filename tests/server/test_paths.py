"""Home and working directory: sandkeep's own for its clients, the vendor's for the vendor's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sandkeep import sync
from tests.cli.program import Program
from tests.host import rootfs_runner
from tests.server.conftest import Box, create, scoped
from tests.server.server_process import PROJECT, ServerProcess

OWN = ["/home/sandbox", "/workspace"]
VENDOR = ["/vercel", "/vercel/sandbox"]
WHERE = "echo $HOME $(pwd) $PATH"


@pytest.fixture(params=["unix", "tcp"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[sync.Client]:
    url, token = (f"unix://{server.socket}", None) if request.param == "unix" else (server.url, server.token)
    with sync.Client(url, token=token) as found:
        yield found


def where(box: sync.Sandbox) -> list[str]:
    """The home, the working directory and the path of a program."""
    done = box.run_process("sh", ["-c", WHERE], capture_output=True, check=True)
    return done.stdout_text.split()


def test_the_sdks_sandboxes_have_sandkeeps_paths(client: sync.Client) -> None:
    with client.create_sandbox() as box:
        *places, path = where(box)
        assert places == OWN and box.cwd == OWN[1]
        assert path.startswith("/home/sandbox/.local/bin:") and "vercel" not in path
        box.fs.write_text("here", "relative")
        assert box.fs.read_text("/workspace/here") == "relative"
        shell = box.run_process("bash", ["-lc", "cd; pwd; echo ~sandbox"], capture_output=True, check=True)
        assert shell.stdout_text == "/home/sandbox\n/home/sandbox\n"
        box.stop()
        *places, _ = where(box)
        assert places == OWN
        with box.fork() as fork:
            assert where(fork)[:2] == OWN and fork.fs.read_text("here") == "relative"


def test_the_command_lines_sandboxes_have_them_too(server: ServerProcess) -> None:
    cli = Program({"SANDKEEP_URL": f"unix://{server.socket}"})
    assert cli("run", "--", "sh", "-c", "echo $HOME $PWD").text.split() == OWN


def test_the_vendors_clients_get_the_vendors(api: httpx.Client) -> None:
    for route in ("/v3/sandboxes", "/v2/sandboxes"):
        made = api.post(route, params=scoped(), json={"projectId": PROJECT}).json()
        box = Box(api, made["sandbox"]["name"], made)
        assert made["sandbox"]["cwd"] == made["session"]["cwd"] == VENDOR[1]
        printed = box.run("sh", "-c", WHERE).text
        assert all(place in printed for place in VENDOR)
        assert "/vercel/.local/bin:/vercel/bin:" in printed and "/home/sandbox" not in printed
        api.delete(f"/v2/sandboxes/{box.name}", params=scoped())


def test_a_snapshot_keeps_its_paths_whoever_restores_it(server: ServerProcess, api: httpx.Client) -> None:
    box = create(api)
    box.run("touch", "kept")
    snapshot = api.post(f"{box.path}/snapshot").json()["snapshot"]["id"]
    with (
        sync.Client(server.url, token=server.token) as client,
        client.create_sandbox(source=sync.SnapshotSource(snapshot)) as restored,
    ):
        assert where(restored)[:2] == VENDOR
        assert restored.fs.exists("kept")
    api.delete(f"/v2/sandboxes/{box.name}", params=scoped(deleteOrphanSnapshots="true"))


def test_images_of_others_have_the_same_working_directory(
    server: ServerProcess, api: httpx.Client, tmp_path: Path
) -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox is not installed")
    (tmp_path / "bin").mkdir()
    shutil.copy(busybox, tmp_path / "bin/sh")
    with sync.Client(f"unix://{server.socket}") as client:
        client.images.import_(str(tmp_path), "paths-test", kind="directory")
        with client.create_sandbox(image="paths-test") as box:
            assert where(box)[:2] == OWN
    made = create(api, image="paths-test")
    assert all(place in made.run("sh", "-c", WHERE).text for place in VENDOR)
    api.delete(f"/v2/sandboxes/{made.name}", params=scoped(deleteOrphanSnapshots="true"))


CHOSEN = ["/data/home", "/srv/app"]


@pytest.fixture(scope="module")
def chosen(server: ServerProcess) -> str:
    """An image whose author chose home and working directory."""
    shell = Path(rootfs_runner.require_program("busybox")).read_bytes()
    config = {"WorkingDir": "/srv/app", "Env": ["HOME=/data/home"]}
    made = rootfs_runner.OciImage(config=config).add(rootfs_runner.tar_of({"bin/sh": shell}, mode=0o755))
    path = rootfs_runner.write_layout(str(server.data / "chosen-layout"), {"one": made})
    with sync.Client(f"unix://{server.socket}") as client:
        client.images.import_(path, "chosen-paths", kind="oci-layout")
    return "chosen-paths"


def test_an_images_own_working_directory_is_kept_by_everything_made_from_it(
    client: sync.Client, chosen: str
) -> None:
    with client.create_sandbox(image=chosen) as box:
        assert where(box)[:2] == CHOSEN and box.cwd == CHOSEN[1]
        box.fs.write_text("here", "relative")
        assert box.fs.read_text("/srv/app/here") == "relative"
        box.stop()
        assert where(box)[:2] == CHOSEN and box.fs.read_text("here") == "relative"
        with box.fork() as fork:
            assert where(fork)[:2] == CHOSEN and fork.cwd == CHOSEN[1] and fork.fs.exists("here")
        snapshot = box.snapshot()
        with client.create_sandbox(source=sync.SnapshotSource(snapshot.id)) as restored:
            assert where(restored)[:2] == CHOSEN and restored.fs.exists("here")


def test_the_vendors_clients_get_an_images_own_working_directory_too(api: httpx.Client, chosen: str) -> None:
    made = create(api, image=chosen)
    assert made.created["sandbox"]["cwd"] == made.created["session"]["cwd"] == CHOSEN[1]
    assert all(place in made.run("sh", "-c", WHERE).text for place in CHOSEN)
    api.delete(f"/v2/sandboxes/{made.name}", params=scoped(deleteOrphanSnapshots="true"))


def test_an_unknown_layout_is_refused(api: httpx.Client) -> None:
    refused = api.post("/v3/sandboxes", params=scoped(), json={"projectId": PROJECT, "paths": "mine"})
    assert refused.status_code == 400 and "paths" in refused.text
