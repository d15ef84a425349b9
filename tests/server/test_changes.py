"""What changing the configuration of a running sandbox does to its session, and to the next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import Box, create, scoped
from tests.server.server_process import ServerProcess


@pytest.fixture(params=["tcp", "unix"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() if request.param == "tcp" else server.local(params=scoped()) as client:
        yield client


def change(box: Box, **body: Any) -> dict[str, Any]:
    answer = box.api.patch(f"/v2/sandboxes/{box.name}", params=scoped(), json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["sandbox"])


def look(box: Box, *, resume: bool = False) -> Box:
    answer = box.api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume=str(resume).lower()))
    assert answer.status_code == 200, answer.text
    return Box(box.api, box.name, answer.json())


def stop(box: Box) -> dict[str, Any]:
    answer = box.api.post(f"{box.path}/stop", params=scoped())
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def write(box: Box, text: str) -> None:
    assert '"exitCode":0' in box.run("sh", "-c", f"echo {text} > /vercel/sandbox/f").text.replace(" ", "")


def reads(box: Box) -> str:
    """What is in the file, or nothing."""
    answer = box.api.post(f"{box.path}/fs/read", params=scoped(), json={"path": "/vercel/sandbox/f"})
    return answer.text.strip() if answer.status_code == 200 else ""


def remove(box: Box) -> None:
    box.api.delete(f"/v2/sandboxes/{box.name}", params=scoped(deleteOrphanSnapshots="true"))


def test_a_running_session_keeps_its_files_when_its_sandbox_stops_being_persistent(
    client: httpx.Client,
) -> None:
    box = create(client)
    write(box, "kept")
    assert change(box, persistent=False)["persistent"] is False
    assert "snapshot" in stop(box), "the change counts from the next session on"

    after = look(box, resume=True)
    assert reads(after) == "kept"
    write(after, "forgotten")
    assert "snapshot" not in stop(after)
    assert reads(look(box, resume=True)) == "kept"
    remove(box)


def test_making_a_sandbox_persistent_keeps_what_its_running_session_wrote(client: httpx.Client) -> None:
    box = create(client, persistent=False)
    write(box, "kept")
    change(box, persistent=True)
    assert "snapshot" in stop(box)
    assert reads(look(box, resume=True)) == "kept"
    remove(box)


def test_a_running_session_keeps_its_files_across_a_restart_too(server: ServerProcess) -> None:
    """A restarted server knows what the session was started as."""
    with server.local(params=scoped()) as client:
        box = create(client)
        write(box, "kept")
        change(box, persistent=False)
    server.stop()
    server.start()
    with server.local(params=scoped()) as client:
        again = Box(client, box.name, box.created)
        assert "snapshot" in stop(again)
        assert reads(look(again, resume=True)) == "kept"
        remove(again)


def test_a_snapshot_chosen_while_a_session_runs_is_what_the_next_one_starts_from(
    client: httpx.Client,
) -> None:
    box = create(client)
    write(box, "first")
    first = stop(box)["snapshot"]["id"]
    second = look(box, resume=True)
    write(second, "second")
    assert change(second, currentSnapshotId=first)["currentSnapshotId"] == first

    stopped = stop(second)
    assert stopped["sandbox"]["currentSnapshotId"] == first
    left = stopped["snapshot"]["id"]
    assert left != first, "what the session wrote is kept beside it"
    third = look(box, resume=True)
    assert reads(third) == "first"
    write(third, "third")
    assert stop(third)["sandbox"]["currentSnapshotId"] not in (first, left), "a choice counts once"

    change(box, currentSnapshotId=left)
    assert reads(look(box, resume=True)) == "second"
    remove(box)


def test_a_snapshot_taken_by_request_is_the_latest_choice(box: Box) -> None:
    write(box, "first")
    first = stop(box)["snapshot"]["id"]
    second = look(box, resume=True)
    write(second, "second")
    change(second, currentSnapshotId=first)
    taken = box.api.post(f"{second.path}/snapshot", params=scoped()).json()["snapshot"]["id"]
    assert look(box).created["sandbox"]["currentSnapshotId"] == taken


def test_a_choice_that_is_deleted_meanwhile_is_none(box: Box) -> None:
    write(box, "first")
    first = stop(box)["snapshot"]["id"]
    second = look(box, resume=True)
    write(second, "second")
    change(second, currentSnapshotId=first)
    assert box.api.delete(f"/v2/sandboxes/snapshots/{first}", params=scoped()).status_code == 200
    stop(second)
    assert reads(look(box, resume=True)) == "second"
