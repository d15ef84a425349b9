"""Snapshots over HTTP: pages, the tree, tombstones."""

from __future__ import annotations

from typing import Any

from tests.server.conftest import Box, scoped
from tests.server.test_sandboxes import no_nulls, refused


def take(box: Box, times: int) -> list[str]:
    """Snapshots one after another, each with the one before as its parent."""
    found = []
    for _ in range(times):
        resumed = box.api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true")).json()
        path = f"/v2/sandboxes/sessions/{resumed['session']['id']}/snapshot"
        found.append(box.api.post(path).json()["snapshot"]["id"])
    return found


def tree(box: Box, anchor: str, **more: Any) -> dict[str, Any]:
    params = scoped(snapshotId=anchor, **more)
    return dict(box.api.get("/v2/sandboxes/snapshots/tree", params=params).json())


def test_snapshots_form_a_tree_that_can_be_walked_both_ways(box: Box) -> None:
    first, second, third = take(box, 3)
    up = tree(box, third)
    no_nulls(up)
    assert up["anchor"]["snapshot"]["id"] == third
    assert [node["snapshot"]["id"] for node in up["snapshots"]] == [second, first]
    assert up["pagination"] == {"count": 2, "next": None}
    assert all(node["count"] == "1" for node in up["snapshots"])
    page = tree(box, third, limit=1)
    assert page["pagination"] == {"count": 1, "next": second}
    down = tree(box, first, sortOrder="asc")
    assert [node["snapshot"]["id"] for node in down["snapshots"]] == [second, third]
    missing = box.api.get("/v2/sandboxes/snapshots/tree", params=scoped(snapshotId="snap_x"))
    assert refused(missing) == (404, "not_found")


def test_a_deleted_snapshot_stays_visible_and_cannot_be_resumed_from(box: Box) -> None:
    [snapshot] = take(box, 1)
    path = f"/v2/sandboxes/snapshots/{snapshot}"
    assert box.api.get(path).json()["snapshot"]["status"] == "created"
    for answer in (box.api.delete(path), box.api.delete(path), box.api.get(path)):
        assert (answer.status_code, answer.json()["snapshot"]["status"]) == (200, "deleted")
    listed = box.api.get("/v2/sandboxes/snapshots", params=scoped(name=box.name)).json()
    assert [row["status"] for row in listed["snapshots"]] == ["deleted"]
    resumed = box.api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true"))
    assert refused(resumed) == (410, "snapshot_not_found")


def test_every_answer_has_the_size_of_the_snapshot(box: Box) -> None:
    """At once, and the same later: nobody has to ask again."""

    def grown(megabytes: int) -> None:
        box.run("dd", "if=/dev/urandom", f"of=/vercel/sandbox/{megabytes}", "bs=1M", f"count={megabytes}")

    grown(3)
    checkpoint = box.api.post(f"{box.own}/checkpoint").json()["snapshot"]
    stopped = box.api.post(f"{box.path}/stop").json()["snapshot"]
    for snapshot in (checkpoint, stopped):
        assert 3 << 20 <= snapshot["sizeBytes"] < 4 << 20, snapshot
        later = box.api.get(f"/v2/sandboxes/snapshots/{snapshot['id']}", params=scoped()).json()["snapshot"]
        assert later["sizeBytes"] == snapshot["sizeBytes"]
    resumed = box.api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true")).json()
    again = Box(box.api, box.name, resumed)
    again.run("dd", "if=/dev/urandom", "of=/vercel/sandbox/more", "bs=1M", "count=2")
    taken = box.api.post(f"{again.path}/snapshot").json()["snapshot"]
    assert 2 << 20 <= taken["sizeBytes"] < 3 << 20, "what it adds to the one before"
