"""Processes in full: exact output from any offset, and processes that run elsewhere."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx

from sandkeep.wire import frames
from tests.polling import until
from tests.server.conftest import Box
from tests.server.test_sandboxes import refused


def records(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.content.splitlines() if line]


def test_exact_bytes_come_with_offset_time_and_stream_from_any_offset(box: Box) -> None:
    command = box.start("sh", "-c", r"printf '\377\000a'; read line; printf bcd >&2", attachStdin=True)
    path = f"{box.own}/processes/{command['id']}/output"
    until(lambda: records(box.api.get(path, params={"follow": "false"})))
    data = base64.b64encode(b"\n").decode()
    box.api.post(f"{box.path}/cmd/{command['id']}/stdin", json={"data": data, "offset": 0})
    box.api.get(f"{box.path}/cmd/{command['id']}", params={"wait": "true"})
    found = records(box.api.get(path))
    read = [(record["stream"], base64.b64decode(record["data"])) for record in found if "data" in record]
    assert read == [("stdout", b"\xff\x00a"), ("stderr", b"bcd")]
    assert [record["offset"] for record in found] == [0, 3, 6] and found[-1]["end"]
    assert found[0]["timeUs"] < found[1]["timeUs"]
    middle = records(box.api.get(path, params={"offset": 4}))
    assert base64.b64decode(middle[0]["data"]) == b"cd"


def test_the_same_as_binary_frames(box: Box) -> None:
    command = box.start("sh", "-c", "echo out; sleep 0.05; echo err >&2")
    path = f"{box.own}/processes/{command['id']}/output"
    answer = box.api.get(path, headers={"accept": frames.CONTENT_TYPE})
    assert answer.headers["content-type"] == frames.CONTENT_TYPE
    found, at = [], 0
    while at < len(answer.content):
        length, kind, _, offset = frames.HEADER.unpack_from(answer.content, at)
        at += frames.HEADER.size + length
        found.append((kind, offset, answer.content[at - length : at]))
    assert found == [(1, 0, b"out\n"), (2, 4, b"err\n"), (4, 8, b"")]


def test_without_follow_the_answer_ends_where_the_log_does(box: Box) -> None:
    command = box.start("sh", "-c", "echo now; sleep 60")
    path = f"{box.own}/processes/{command['id']}/output"
    found = until(lambda: records(box.api.get(path, params={"follow": "false"})))
    assert [base64.b64decode(record["data"]) for record in found] == [b"now\n"]


def test_how_much_input_has_arrived_can_be_asked(box: Box) -> None:
    command = box.start("cat", attachStdin=True)
    assert command["attachStdin"] is True
    path = f"{box.own}/processes/{command['id']}/stdin"
    assert box.api.get(path).json() == {"bytesWritten": 0, "open": True}
    data = base64.b64encode(b"hello").decode()
    box.api.post(f"{box.path}/cmd/{command['id']}/stdin", json={"data": data, "offset": 0, "close": True})
    assert box.api.get(path).json() == {"bytesWritten": 5, "open": False}
    box.api.get(f"{box.path}/cmd/{command['id']}", params={"wait": "true"})
    assert box.api.get(path).json() == {"bytesWritten": 5, "open": False}
    without = box.start("true")
    assert "attachStdin" not in without
    answer = box.api.get(f"{box.own}/processes/{without['id']}/stdin")
    assert refused(answer) == (400, "command_stdin_unavailable")
    assert refused(box.api.get(f"{box.own}/processes/cmd_x/stdin")) == (404, "not_found")


def test_metadata_is_shown_where_there_is_some_and_searched(box: Box) -> None:
    noted = box.start("true", metadata={"step": "a:b"})
    observed = box.api.post(f"{box.own}/processes", json={"command": "x", "metadata": {"step": "2"}})
    plain = box.start("true")
    assert noted["metadata"] == {"step": "a:b"} and "metadata" not in plain
    assert observed.json()["process"]["metadata"] == {"step": "2"}

    def found(wanted: str) -> list[str]:
        answer = box.api.get(f"{box.own}/processes", params={"metadata": wanted})
        return [row["id"] for row in answer.json()["processes"]]

    assert found("step:a:b") == [noted["id"]]
    assert found("step:2") == [observed.json()["process"]["id"]]
    assert found("step:") == []
    wrong = box.api.get(f"{box.own}/processes", params={"metadata": "step"})
    assert refused(wrong) == (400, "bad_request")
    body = {"command": "true", "metadata": {"a:b": "c"}}
    for path in (f"{box.path}/cmd", f"{box.own}/processes"):
        answer = box.api.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["details"]["field"] == 'metadata["a:b"]'


def test_a_process_that_runs_elsewhere_can_be_recorded(box: Box) -> None:
    begun = box.api.post(f"{box.own}/processes", json={"command": "remote", "args": ["x"], "cwd": "/w"})
    process = begun.json()["process"]
    assert (process["kind"], process["status"], process["exitCode"]) == ("observed", "running", None)
    path = f"{box.own}/processes/{process['id']}"
    assert box.api.post(f"{path}/output", content=b"some ").json() == {"offset": 5}
    assert box.api.post(f"{path}/output", params={"stream": "stderr"}, content=b"text").json() == {
        "offset": 9
    }
    ended = box.api.post(f"{path}/finish", json={"exitCode": 2}).json()["process"]
    assert (ended["status"], ended["exitCode"]) == ("exited", 2)
    logs = box.api.get(f"{box.path}/cmd/{process['id']}/logs").text.splitlines()
    assert [json.loads(line) for line in logs] == [
        {"stream": "stdout", "data": "some "},
        {"stream": "stderr", "data": "text"},
    ]
    assert box.api.post(f"{path}/output", content=b"late").status_code == 400
    assert box.api.get(path).json()["process"]["exitCode"] == 2
    assert process["id"] in {row["id"] for row in box.api.get(f"{box.own}/processes").json()["processes"]}
    assert refused(box.api.get(f"{box.own}/processes/cmd_x")) == (404, "not_found")
