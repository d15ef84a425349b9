"""The server process: one per directory, ready when it says so, and nothing of what it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.conftest import descendants
from tests.server.conftest import create, run_body, scoped
from tests.server.server_process import PROJECT, ServerProcess, running_server


def test_stopping_and_killing_the_server_leaves_sessions_and_output(able: None) -> None:
    with running_server() as server:
        with server.client() as api:
            box = create(api)
            command = box.start("sh", "-c", "for n in 1 2 3 4 5 6 7 8; do echo $n; sleep 0.2; done")
        for number, expected in ((signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)):
            assert server.stop(number) == expected
            server.start()
            with server.client() as api:
                found = api.get(f"/v2/sandboxes/{box.name}", params=scoped()).json()
                assert (found["session"]["id"], found["session"]["status"]) == (box.session, "running")
        with server.client() as api:
            logs = api.get(f"{box.path}/cmd/{command['id']}/logs").text
            assert [json.loads(line)["data"] for line in logs.splitlines()]
            assert (
                "".join(json.loads(line)["data"] for line in logs.splitlines()) == "1\n2\n3\n4\n5\n6\n7\n8\n"
            )
            ended = api.get(f"{box.path}/cmd/{command['id']}", params={"wait": "true"}).json()
            assert ended["command"]["exitCode"] == 0


def test_what_was_acknowledged_survives_the_death_of_every_process_at_once(able: None) -> None:
    """As when the container they run in is removed: names, files and output are there."""
    with running_server() as server:
        with server.client() as api:
            stopped, running = create(api), create(api)
            for box in (stopped, running):
                assert box.run("bash", "-c", "echo written | tee file").status_code == 200
            api.post(f"{stopped.path}/stop")
            command = running.start("bash", "-c", "echo begun; sleep 600")
            with api.stream("GET", f"{running.path}/cmd/{command['id']}/logs") as logs:
                assert "begun" in next(logs.iter_lines())
        everybody = [server.pid, *(int(line.split()[0]) for line in descendants(server.pid))]
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)  # so that nobody notices that another one is gone
        for pid in everybody:
            os.kill(pid, signal.SIGKILL)
        server.stop(signal.SIGKILL)
        server.start()
        with server.client() as api:
            ended = api.get(running.path).json()["session"]
            assert ended["status"] == "aborted"
            assert "begun" in api.get(f"{running.path}/cmd/{command['id']}/logs").text
            for box in (stopped, running):
                found = api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true")).json()
                path = f"/v2/sandboxes/sessions/{found['session']['id']}"
                body = run_body("cat", "file", wait=True, logs=True)
                assert "written" in api.post(f"{path}/cmd", json=body).text


def test_a_stream_under_way_does_not_delay_the_end(able: None) -> None:
    with running_server() as server, server.client() as api:
        box = create(api)
        body = run_body("sleep", "60", wait=True, logs=True)
        with api.stream("POST", f"{box.path}/cmd", json=body) as answer:
            incoming = answer.iter_lines()
            next(incoming)
            assert server.stop() == 0
            with pytest.raises(httpx.RemoteProtocolError):
                list(incoming)
        assert "request failed" not in server.log()


def test_neither_does_a_request_that_waits_for_a_process(able: None) -> None:
    with running_server() as server, server.client() as api:
        box = create(api)
        command = box.start("sleep", "60")
        answers: list[object] = []

        def wait() -> None:
            try:
                answers.append(api.get(f"{box.path}/cmd/{command['id']}", params={"wait": "true"}))
            except httpx.HTTPError as error:
                answers.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(
            0.5
        )  # nothing shows that it has arrived; one that has not proves nothing and fails nothing
        assert server.stop() == 0
        waiting.join()
        assert isinstance(answers[0], httpx.RemoteProtocolError)
        assert "graceful shutdown exceeded" not in server.log() and "request failed" not in server.log()


def test_one_server_per_data_directory(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "sandkeep", "serve", "--data-dir", str(server.data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"another server is running on {server.data} (process {server.pid})" in done.stderr


def test_a_taken_port_is_a_clear_error(server: ServerProcess, tmp_path: object) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "sandkeep", "serve", "--data-dir", str(tmp_path), "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_it_says_where_it_listens_and_logs_lines_of_json(able: None) -> None:
    with running_server("--log-format", "json", "--log-level", "debug") as server:
        with server.client() as api:
            api.get("/v2/sandboxes", params=scoped())
            api.get("/health")  # a line is written after its answer, and before the next request
        log = server.log()
        assert f"http         {server.url}" in log
        assert f"unix socket  {server.socket}" in log
        logged = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        requests = [(line["path"], line["status"]) for line in logged if line["message"] == "request"]
        assert ("/v2/sandboxes", 200) in requests
        assert server.token not in log


def test_settings_of_the_data_directory_apply_and_unknown_ones_are_refused(able: None) -> None:
    with running_server(settings={"max_timeout_ms": 1_000_000}) as server, server.client() as api:
        body = {"projectId": PROJECT, "timeout": 2_000_000}
        refused = api.post("/v3/sandboxes", params=scoped(), json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "sandbox_timeout_invalid")
        wrong = server.data / "wrong.json"
        wrong.write_text('{"max_time": 1}')
        command = [sys.executable, "-m", "sandkeep", "serve", "--data-dir", str(server.data / "other")]
        done = subprocess.run([*command, "--settings", str(wrong)], capture_output=True, text=True)
        assert done.returncode == 2 and "unknown settings max_time" in done.stderr
