"""Sessions over HTTP: states, stop, extend, policy, snapshots and checkpoints, usage."""

from __future__ import annotations

import httpx

from sandkeep.linux.overlay import HOW
from tests.conftest import IS_ROOT
from tests.server.conftest import Box, create, scoped
from tests.server.test_sandboxes import no_nulls, refused


def test_stop_can_be_repeated_and_shows_the_snapshot(box: Box) -> None:
    first = box.api.post(f"{box.path}/stop", json={}).json()
    again = box.api.post(f"{box.path}/stop", headers={"content-type": "application/json"}).json()
    for answer in (first, again):
        no_nulls(answer)
        assert answer["session"]["id"] == answer["sandbox"]["currentSessionId"] == box.session
        assert answer["session"]["status"] == "stopped"
        assert answer["snapshot"]["id"] == answer["sandbox"]["currentSnapshotId"]
        assert answer["snapshot"]["creationMethod"] == "automatic"


def test_without_persistence_a_stop_keeps_nothing(api: httpx.Client) -> None:
    box = create(api, persistent=False)
    stopped = api.post(f"{box.path}/stop").json()
    assert "snapshot" not in stopped and "currentSnapshotId" not in stopped["sandbox"]
    api.delete(f"/v2/sandboxes/{box.name}", params=scoped())


def test_whatever_needs_a_running_session_is_gone_after_it(box: Box) -> None:
    box.api.post(f"{box.path}/stop")
    for path, body in (
        ("cmd", {"command": "true"}),
        ("fs/read", {"path": "x"}),
        ("fs/mkdir", {"path": "x"}),
        ("extend-timeout", {"duration": 1000}),
        ("network-policy", {"mode": "deny-all"}),
        ("snapshot", {}),
        ("interactive", {}),
    ):
        assert refused(box.api.post(f"{box.path}/{path}", json=body)) == (410, "sandbox_stopped"), path
    large = b"x" * (3 << 20)
    upload = box.api.post(f"{box.path}/fs/write", content=large, headers={"content-type": "application/gzip"})
    assert refused(upload) == (410, "sandbox_stopped")
    assert box.api.get(box.path).json()["session"]["status"] == "stopped"


def test_extending_grows_the_session_only_and_has_a_limit(box: Box) -> None:
    before = box.created["session"]["timeout"]
    extended = box.api.post(f"{box.path}/extend-timeout", json={"duration": 60_000}).json()["session"]
    assert extended["timeout"] == before + 60_000
    sandbox = box.api.get(f"/v2/sandboxes/{box.name}", params=scoped()).json()["sandbox"]
    assert sandbox["timeout"] == before
    assert sandbox["expiresAt"] == box.created["sandbox"]["expiresAt"] + 60_000
    too_far = box.api.post(f"{box.path}/extend-timeout", json={"duration": 5 * 86_400_000})
    assert refused(too_far) == (400, "sandbox_timeout_invalid")
    assert refused(box.api.post(f"{box.path}/extend-timeout", json={"duration": 1})) == (400, "bad_request")


def test_a_live_policy_belongs_to_the_session(box: Box) -> None:
    answer = box.api.post(f"{box.path}/network-policy", json={"mode": "deny-all"})
    assert answer.json()["session"]["networkPolicy"] == {"mode": "deny-all"}
    sandbox = box.api.get(f"/v2/sandboxes/{box.name}", params=scoped()).json()["sandbox"]
    assert sandbox["networkPolicy"] == {"mode": "allow-all"}


def test_a_snapshot_ends_the_session_and_a_checkpoint_does_not(box: Box) -> None:
    box.run("sh", "-c", "echo one > f")
    checkpoint = box.api.post(f"{box.own}/checkpoint", json={"expiration": 0})
    assert checkpoint.status_code == 200, checkpoint.text
    assert checkpoint.json()["session"]["status"] == "running"
    assert "expiresAt" not in checkpoint.json()["snapshot"]
    taken = box.api.post(f"{box.path}/snapshot", json={"expiration": 86_400_000}).json()
    assert taken["session"]["status"] == "stopped"
    snapshot = taken["snapshot"]
    assert snapshot["creationMethod"] == "manual"
    assert snapshot["expiresAt"] - snapshot["createdAt"] == 86_400_000
    no_nulls(taken)


def test_sessions_are_listed_and_found_by_id(box: Box) -> None:
    box.api.post(f"{box.path}/stop")
    box.api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true"))
    listed = box.api.get("/v2/sandboxes/sessions", params=scoped(name=box.name)).json()
    no_nulls(listed)
    assert [session["status"] for session in listed["sessions"]] == ["running", "stopped"]
    shown = box.api.get(box.path).json()
    assert shown["session"]["id"] == box.session and shown["routes"] == []
    assert shown["session"]["duration"] >= 0


def test_usage_is_shown_while_it_runs_and_in_total(box: Box) -> None:
    box.run("sh", "-c", "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done")
    live = box.api.get(f"{box.own}/usage").json()["usage"]
    assert live["durationMs"] > 0
    # Without control groups the time of what runs is known when it has ended.
    assert live["activeCpuDurationMs"] > 0 or not IS_ROOT
    box.api.post(f"{box.path}/stop")
    total = box.api.get(f"/v1/sandboxes/{box.name}/usage", params=scoped()).json()["usage"]
    assert total["activeCpuDurationMs"] >= live["activeCpuDurationMs"]


def test_a_session_shows_its_barriers_and_how_its_root_filesystem_is_mounted(box: Box) -> None:
    shown = box.api.get(box.path).json()["session"]["barriers"]
    assert shown["user-namespace"] == "in force"
    state, _, how = shown["root-filesystem"].partition(": ")
    assert (state, how in HOW.values()) == ("in force", True)
