"""Handles written down, sent to wherever, and bound again: to the same thing, or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

import sandkeep
from sandkeep.errors import InvalidRequest, NotFound
from tests.server.server_process import ServerProcess

pytestmark = pytest.mark.anyio

ELSEWHERE = """
import json, pickle, sys
from sandkeep import sync
box = sync.bind(sync.SandboxReference(**json.loads(sys.argv[1])))
process = sync.bind(pickle.loads(bytes.fromhex(sys.argv[2])))
print(box.fs.read_text("note"), process.stdout.read().decode(), process.wait(), process.command)
"""


def elsewhere(server: ServerProcess, *references: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *references],
        env={**os.environ, "SANDKEEP_URL": server.url, "SANDKEEP_TOKEN": server.token},
        capture_output=True,
        text=True,
        check=False,
    )


async def test_a_handle_is_written_down_and_bound_in_another_process(
    server: ServerProcess, name: str
) -> None:
    async with sandkeep.Client(server.url, token=server.token) as client:
        async with client.create_sandbox(name) as box:
            await box.fs.write_text("note", "kept")
            process = await box.create_process("sh", ["-c", "echo printed; exit 3"])
            written = json.dumps(dataclasses.asdict(box.reference()))
            pickled = pickle.dumps(process.reference()).hex()
            assert server.token not in written + repr(box.reference())
            assert server.token.encode() not in bytes.fromhex(pickled)
            done = elsewhere(server, written, pickled)
            assert (done.stdout, done.returncode) == ("kept printed\n 3 sh\n", 0), done.stderr
            reference = box.reference()
        with pytest.raises(NotFound):
            await client.bind(reference)


async def test_binding_starts_nothing_and_what_is_bound_works(name: str) -> None:
    box = await sandkeep.create_sandbox(name)
    reference = pickle.loads(pickle.dumps(box.reference()))
    assert reference == box.reference() and reference.name == name and reference.url.startswith("unix:///")
    process = await box.create_process("echo", ["printed"])
    await process.wait()
    await box.stop()
    seen: list[str] = []

    async def resumed(box: sandkeep.Sandbox) -> None:
        seen.append(box.name)

    bound = await sandkeep.bind(reference, on_resume=resumed)
    assert bound.status is sandkeep.SessionStatus.STOPPED and not seen
    assert (await (await sandkeep.bind(process.reference())).communicate())[0] == b"printed\n"
    await bound.run_process("true", check=True)
    assert seen == [name]
    await bound.destroy()


async def test_what_is_somewhere_else_is_not_bound(server: ServerProcess, name: str) -> None:
    """A sandbox of that name there would be another one."""
    local = f"unix://{server.socket}"
    async with (
        sandkeep.Client(local, team=server.team, project=server.project) as client,
        sandkeep.Client(server.url, token=server.token) as remote,
        sandkeep.Client(local, team=server.team, project="another") as other,
        client.create_sandbox(name) as box,
        other.create_sandbox(name),
    ):
        reference = box.reference()
        assert (reference.team, reference.project) == (server.team, server.project)
        for wrong, field in (
            (dataclasses.replace(reference, url="http://127.0.0.1:9"), "reference.url"),
            (dataclasses.replace(reference, team="nobody"), "reference.team"),
            (dataclasses.replace(reference, project="another"), "reference.project"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await client.bind(wrong)
            assert refused.value.field == field and refused.value.hint
        with pytest.raises(InvalidRequest) as refused:
            await other.bind(reference)
        assert refused.value.field == "reference.project"
        with pytest.raises(InvalidRequest, match=r"client\.url"):
            await remote.bind(reference)
        bound = await remote.bind(dataclasses.replace(reference, url=remote.url))
        assert bound.current_session.id == box.current_session.id
        assert bound.reference().project == server.project, "known, though the client did not name it"
        process = await box.create_process("true")
        with pytest.raises(NotFound):
            await other.bind(process.reference())


async def test_what_is_no_reference_is_refused_by_name() -> None:
    made: Any = sandkeep.SandboxReference
    for arguments, field in (
        ({"name": "", "url": "unix:///x"}, "name"),
        ({"name": "a", "url": None}, "url"),
        ({"name": "a", "url": "unix:///x", "project": 5}, "project"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            made(**arguments)
        assert refused.value.field == field
    with pytest.raises(InvalidRequest):
        sandkeep.ProcessReference(id="cmd_1", session_id="", url="unix:///x")
    bind: Any = sandkeep.bind
    with pytest.raises(InvalidRequest, match="SandboxReference"):
        await bind("a-name")
    assert sandkeep.Client("http://me:secret@127.0.0.1:9").url == "http://127.0.0.1:9"
