"""Events: pages, and a stream that misses nothing."""

from __future__ import annotations

import json
import threading

from tests.server.conftest import Box, scoped
from tests.server.test_sandboxes import refused


def test_events_of_a_sandbox_are_listed_newest_first(box: Box) -> None:
    box.api.post(f"{box.path}/stop")
    found = box.api.get("/v1/events", params=scoped(name=box.name)).json()
    kinds = [event["kind"] for event in found["events"]]
    assert kinds[0] == "session.ended" and kinds[-1] == "session.started"
    assert all(event["sessionId"] == box.session for event in found["events"])


def test_following_goes_on_where_the_cursor_is(box: Box) -> None:
    params = scoped(name=box.name, follow="true")
    seen = []
    with box.api.stream("GET", "/v1/events", params=params) as answer:
        stopping = threading.Thread(target=lambda: box.api.post(f"{box.path}/stop"))
        stopping.start()
        for line in answer.iter_lines():
            seen.append(json.loads(line))
            if seen[-1]["event"]["kind"] == "session.ended":
                break
        stopping.join()
    after = scoped(name=box.name, follow="true", cursor=seen[0]["cursor"])
    with box.api.stream("GET", "/v1/events", params=after) as answer:
        again = []
        for line in answer.iter_lines():
            again.append(json.loads(line))
            if len(again) == len(seen) - 1:
                break
    assert again == seen[1:]
    assert refused(box.api.get("/v1/events", params=scoped(follow="true", cursor="x"))) == (
        400,
        "bad_request",
    )


def test_following_a_sandbox_ends_when_it_is_destroyed(box: Box) -> None:
    params = scoped(name=box.name, follow="true", sortOrder="asc")
    with box.api.stream("GET", "/v1/events", params=params) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines))["event"]["kind"] == "session.started"
        box.api.delete(f"/v2/sandboxes/{box.name}", params=scoped())
        rest = [json.loads(line) for line in lines if line]
    assert all(each["event"]["sessionId"] == box.session for each in rest)
