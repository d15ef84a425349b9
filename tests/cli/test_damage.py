"""What people see of damage, and what they can do about it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.program import Program
from tests.conftest import remove_tree
from tests.polling import ENOUGH
from tests.server.server_process import ServerProcess, running_server


@pytest.fixture
def own(able: None) -> Iterator[ServerProcess]:
    """A server that a test may stop."""
    with running_server() as server:
        yield server


def layers(data: Path) -> list[str]:
    return sorted(name for name in os.listdir(data / "layers") if not name.startswith("."))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_damaged_sandbox_is_named_refused_and_removed(own: ServerProcess, way: str) -> None:
    local = {"SANDKEEP_HOME": str(own.data)}
    sandkeep = Program(local if way == "unix" else {"SANDKEEP_URL": own.url, "SANDKEEP_TOKEN": own.token})
    for name in ("victim", "bystander"):
        sandkeep("create", "--name", name)
        sandkeep("exec", name, "sh", "-c", f"echo {name} > file")
        sandkeep("stop", name)
    assert sandkeep("repair").err.strip() == "nothing is damaged"
    layer = layers(own.data)[0]
    own.stop()
    remove_tree(own.data / "layers" / layer / "fs")
    own.start()
    assert "stopped, damaged" in sandkeep("ls", "--all").text
    assert sandkeep("exec", "bystander", "cat", "file").text == "bystander\n"
    refused = sandkeep("exec", "victim", "true", status=125).err
    assert f"layer {layer} is damaged" in refused and "sandkeep repair" in refused
    assert sandkeep("repair", status=1).text.startswith(f"damaged: victim: layer {layer} is damaged")
    assert "sandbox.damaged" in sandkeep("events", "victim").text
    looked = Program(local)("doctor", "--json", status=1).json
    assert [problem["what"] for problem in looked["damage"]] == ["sandbox victim"]
    sandkeep("rm", "victim", "--delete-orphan-snapshots")
    sandkeep("repair")
    assert Program(local)("doctor", "--json").json["damage"] == []


@pytest.mark.slow
def test_a_data_directory_whose_store_is_lost_is_adopted(able: None, tmp_path: Path) -> None:
    data = tmp_path / "home"
    sandkeep = Program({"SANDKEEP_HOME": str(data)})
    try:
        sandkeep("create", "--name", "web")
        sandkeep("exec", "web", "sh", "-c", "echo precious > file")
        sandkeep("stop", "web")
        end_server(data)
        for path in data.glob("store.db*"):
            path.unlink()
        kept = layers(data)
        refused = sandkeep("ls", status=1).err
        assert "is missing" in refused and "sandkeep repair --adopt" in refused
        assert "is missing" in sandkeep("token", "create", status=1).err
        assert sandkeep("doctor", "--json", status=1).json["damage"][0]["what"] == "store"
        assert layers(data) == kept and not list(data.glob("store.db"))
        [found] = sandkeep("repair", "--adopt", "--json").json
        assert (found["kind"], found["found"]) == ("snapshot", kept[0])
        assert sandkeep("exec", found["name"], "cat", "file").text == "precious\n"
        sandkeep("rm", found["name"], "--delete-orphan-snapshots")
    finally:
        end_server(data)
        remove_tree(data)


def end_server(data: Path) -> None:
    """End the server that the last command started."""
    try:
        pid = json.loads((data / "server.json").read_text())["pid"]
        os.kill(pid, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError):
        return
    deadline = time.monotonic() + ENOUGH
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, "the server does not end"
        time.sleep(0.01)
