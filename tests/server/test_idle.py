"""The idle timeout: what counts as activity of a session, and how an unused session ends."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.polling import until
from tests.server.conftest import Box, create, run_body, scoped
from tests.server.server_process import ServerProcess
from tests.server.test_terminal import open_terminal

IDLE_MS = 5000
LATE = 12.0
"""By then a session that nothing used is stopped: the server looks every 5 seconds."""

SLOW_SERVER = """
import http.server, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(25)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


@pytest.fixture
def made(api: httpx.Client) -> Iterator[list[Box]]:
    boxes: list[Box] = []
    yield boxes
    for box in boxes:
        api.delete(f"/v2/sandboxes/{box.name}", params=scoped(deleteOrphanSnapshots="true"))


def shown(box: Box) -> dict[str, Any]:
    answer = box.api.get(box.path, params=scoped())
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["session"])


def ended(box: Box) -> dict[str, Any]:
    until(lambda: shown(box)["status"] == "stopped", seconds=30)
    return shown(box)


@pytest.mark.slow
def test_a_session_ends_when_nothing_uses_it_and_not_before(
    api: httpx.Client, server: ServerProcess, made: list[Box]
) -> None:
    def box(**options: Any) -> Box:
        made.append(create(api, idleTimeout=IDLE_MS, **options))
        return made[-1]

    def fetch(url: str) -> None:
        with httpx.Client(timeout=60) as client:
            while client.get(url).status_code == 502:
                time.sleep(0.1)

    def wait(box: Box) -> None:
        body = run_body("sleep", "25", wait=True, logs=True)
        with server.client() as client, client.stream("POST", f"{box.path}/cmd", json=body) as answer:
            for _ in answer.iter_bytes():
                pass

    def begin(work: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=args)
        thread.start()
        return thread

    with ExitStack() as stack:
        # Each is used from the moment it is there.
        terminal = box()
        stack.enter_context(open_terminal(terminal, "sleep", "600"))
        (printing := box()).start("sh", "-c", "while :; do echo tick; sleep 1; done")
        (port := box(ports=[8000])).start("python3", "-c", SLOW_SERVER)
        threads = [begin(fetch, port.created["routes"][0]["url"]), begin(wait, waiting := box())]
        (silent := box()).start("sleep", "600")
        quiet, forgetful, looked_at = box(), box(persistent=False), box()
        deadline = time.monotonic() + LATE
        while time.monotonic() < deadline:
            assert shown(looked_at)["idleTimeout"] == IDLE_MS  # looking is not using
            time.sleep(0.5)
        states = {
            name: shown(each)["status"]
            for name, each in {
                "printing": printing,
                "waiting": waiting,
                "terminal": terminal,
                "port": port,
            }.items()
        }
        assert states == dict.fromkeys(states, "running")
        for each in (quiet, silent, looked_at, forgetful):
            assert ended(each)["stopReason"] == "idle"
    kept = api.get(f"/v2/sandboxes/{quiet.name}", params=scoped()).json()["sandbox"]
    assert kept["status"] == "stopped" and kept["currentSnapshotId"] and kept["idleTimeout"] == IDLE_MS
    lost = api.get(f"/v2/sandboxes/{forgetful.name}", params=scoped()).json()["sandbox"]
    assert "currentSnapshotId" not in lost
    assert ended(terminal)["stopReason"] == "idle"
    for thread in threads:
        thread.join()


@pytest.mark.slow
def test_a_session_that_ended_idle_is_resumed_with_its_files(server: ServerProcess) -> None:
    """Over the unix socket, as the user the server runs as."""
    with server.local() as local:

        def run(session_id: str, *command: str) -> str:
            path = f"/v2/sandboxes/sessions/{session_id}/cmd"
            body = run_body(*command, wait=True, logs=True)
            answer = local.post(path, params=scoped(), json=body)
            assert answer.status_code == 200, answer.text
            return answer.text

        box = create(local, idleTimeout=IDLE_MS)
        try:
            run(box.session, "sh", "-c", "echo kept > note")
            assert ended(box)["stopReason"] == "idle"
            again = local.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true")).json()
            assert again["resumed"] and again["session"]["idleTimeout"] == IDLE_MS
            assert "kept" in run(again["session"]["id"], "cat", "note")
        finally:
            local.delete(f"/v2/sandboxes/{box.name}", params=scoped(deleteOrphanSnapshots="true"))


def test_an_idle_timeout_is_changed_taken_away_and_inherited(api: httpx.Client, made: list[Box]) -> None:
    box = create(api, idleTimeout=60_000)
    made.append(box)

    def sandbox() -> dict[str, Any]:
        return dict(api.get(f"/v2/sandboxes/{box.name}", params=scoped()).json()["sandbox"])

    def change(value: int) -> httpx.Response:
        return api.patch(f"/v2/sandboxes/{box.name}", params=scoped(), json={"idleTimeout": value})

    assert change(90_000).status_code == 200
    assert sandbox()["idleTimeout"] == 90_000
    assert shown(box)["idleTimeout"] == 60_000  # from the next session on
    for name, body, expected in (
        (f"f-{secrets.token_hex(4)}", {}, 90_000),
        (f"f-{secrets.token_hex(4)}", {"idleTimeout": 0}, None),
    ):
        forked = api.post(f"/v2/sandboxes/{box.name}/fork", params=scoped(), json={"name": name, **body})
        assert forked.status_code == 200, forked.text
        made.append(Box(api, name, forked.json()))
        assert forked.json()["sandbox"].get("idleTimeout") == expected
        assert forked.json()["session"].get("idleTimeout") == expected
    assert change(0).status_code == 200
    assert "idleTimeout" not in sandbox()
    refused = change(4999)
    assert refused.status_code == 400 and refused.json()["error"]["details"]["field"] == "idleTimeout"
