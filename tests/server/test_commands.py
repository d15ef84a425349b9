"""Commands over HTTP: records, waiting, logs, signals, input."""

from __future__ import annotations

import base64
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from sandkeep.server.routes.commands import PATIENCE
from tests.polling import longer_and_longer
from tests.server.conftest import Box, run_body


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.content.splitlines() if line.strip()]


def text(records: list[dict[str, Any]], stream: str = "stdout") -> str:
    return "".join(record["data"] for record in records if record.get("stream") == stream)


def test_a_waiting_run_is_two_command_records_with_the_output_between(box: Box) -> None:
    answer = box.run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-ndjson"
    records = lines(answer)
    assert [list(record) for record in records] == [
        ["command"],
        ["stream", "data"],
        ["stream", "data"],
        ["command"],
    ]
    first, last = records[0]["command"], records[-1]["command"]
    assert first["exitCode"] is None and last["exitCode"] == 3
    assert first["id"] == last["id"] and first["sessionId"] == box.session
    assert text(records) == "out\n" and text(records, "stderr") == "err\n"
    assert last["durationMs"] >= 0


def test_records_are_ascii_and_keep_every_character(box: Box) -> None:
    answer = box.run("printf", r"\303\251 \000 \360\237\230\200 \377")
    assert answer.content.isascii()
    assert text(lines(answer)) == "é \0 😀 \ufffd"


def test_without_logs_only_the_two_command_records_come(box: Box) -> None:
    answer = box.api.post(f"{box.path}/cmd", json=run_body("echo", "hi", wait=True))
    records = lines(answer)
    assert len(records) == 2 and all("command" in record for record in records)


def test_the_first_record_comes_before_the_command_ends(box: Box) -> None:
    body = run_body("sh", "-c", "read line; echo got $line", wait=True, logs=True, attachStdin=True)
    with box.api.stream("POST", f"{box.path}/cmd", json=body) as answer:
        incoming = answer.iter_lines()
        command = json.loads(next(incoming))["command"]
        stdin = f"{box.path}/cmd/{command['id']}/stdin"
        assert box.api.post(stdin, json={}).json()["bytesWritten"] == 0
        data = base64.b64encode(b"ping\n").decode()
        assert box.api.post(stdin, json={"data": data, "offset": 0}).json()["bytesWritten"] == 5
        rest = [json.loads(line) for line in incoming]
    assert text(rest) == "got ping\n"
    assert rest[-1]["command"]["exitCode"] == 0


def test_a_detached_run_answers_at_once_and_can_be_waited_for(box: Box) -> None:
    command = box.start("sh", "-c", "read line; sleep 0.3; exit 7", attachStdin=True)
    assert command["exitCode"] is None
    path = f"{box.path}/cmd/{command['id']}"
    assert box.api.get(path).json()["command"]["exitCode"] is None
    line = base64.b64encode(b"\n").decode()
    assert box.api.post(f"{path}/stdin", json={"data": line, "offset": 0}).status_code == 200
    assert box.api.get(path, params={"wait": "true"}).json()["command"]["exitCode"] == 7


def test_logs_are_the_same_for_every_reader_and_after_the_session(box: Box) -> None:
    command = box.start("sh", "-c", "for n in 1 2 3; do echo $n; sleep 0.05; done")
    logs = f"{box.path}/cmd/{command['id']}/logs"
    followed = text(lines(box.api.get(logs)))
    assert followed == "1\n2\n3\n"
    box.api.post(f"{box.path}/stop")
    assert text(lines(box.api.get(logs))) == followed
    assert box.api.get(f"{box.path}/cmd/{command['id']}").json()["command"]["exitCode"] == 0


def test_commands_are_listed_newest_first(box: Box) -> None:
    for name in ("first", "second"):
        box.run("echo", name)
    found = box.api.get(f"{box.path}/cmd").json()["commands"]
    assert [command["args"] for command in found] == [["second"], ["first"]]


def test_a_missing_executable_is_an_error_and_not_an_exit_code(box: Box) -> None:
    answer = box.run("no-such-program")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "executable_not_found"


def test_of_requests_with_one_key_one_starts_the_command(box: Box) -> None:
    body = run_body("sh", "-c", "echo x >> count; cat count", wait=True, logs=True)

    def ask(key: str) -> list[dict[str, Any]]:
        return lines(box.api.post(f"{box.path}/cmd", json=body, headers={"idempotency-key": key}))

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, ["one"] * 4))
    assert {records[0]["command"]["id"] for records in answers} == {answers[0][0]["command"]["id"]}
    assert [text(records) for records in answers] == ["x\n"] * 4
    assert text(ask("another")) == "x\nx\n"
    assert len(box.api.get(f"{box.path}/cmd").json()["commands"]) == 2
    box.api.post(f"{box.path}/stop", json={})
    ended = ask("one")
    assert text(ended) == "x\n" and ended[-1]["command"]["exitCode"] == 0


def test_a_key_is_no_novel(box: Box) -> None:
    for key in ("", "x" * 201):
        answer = box.api.post(f"{box.path}/cmd", json=run_body("true"), headers={"idempotency-key": key})
        assert answer.status_code == 400 and "idempotency-key" in answer.json()["error"]["message"]


def test_a_signal_ends_a_command_with_128_more(box: Box) -> None:
    command = box.start("sleep", "60")
    path = f"{box.path}/cmd/{command['id']}"
    assert box.api.post(f"{path}/kill", json={"signal": 15}).status_code == 200
    assert box.api.get(path, params={"wait": "true"}).json()["command"]["exitCode"] == 143
    again = box.api.post(f"{path}/kill", json={"signal": 9})
    assert again.status_code == 200 and again.json()["command"]["exitCode"] == 143


def test_a_timeout_kills_with_137(box: Box) -> None:
    for limit in longer_and_longer(200):
        records = lines(box.run("sh", "-c", "echo before; sleep 60", timeout=limit))
        assert records[-1]["command"]["exitCode"] == 137
        if text(records):
            break
    assert text(records) == "before\n"


def test_input_needs_to_be_attached_and_in_order(box: Box) -> None:
    def stdin(command: dict[str, Any], **body: Any) -> httpx.Response:
        return box.api.post(f"{box.path}/cmd/{command['id']}/stdin", json=body)

    closed = stdin(box.start("sleep", "60"), data="")
    assert (closed.status_code, closed.json()["error"]["code"]) == (400, "command_stdin_unavailable")
    command = box.start("cat", attachStdin=True)
    data = base64.b64encode(b"hello").decode()
    assert stdin(command, data=data, offset=0).json()["bytesWritten"] == 5
    assert stdin(command, data=data, offset=0).json()["bytesWritten"] == 5
    ahead = stdin(command, data=data, offset=9)
    assert (ahead.status_code, ahead.json()["error"]["code"]) == (409, "conflict")
    assert stdin(command, close=True, offset=5).status_code == 200
    waited = box.api.get(f"{box.path}/cmd/{command['id']}", params={"wait": "true"})
    assert waited.json()["command"]["exitCode"] == 0
    assert text(lines(box.api.get(f"{box.path}/cmd/{command['id']}/logs"))) == "hello"
    assert stdin(command, data=data).status_code == 404


def test_a_client_that_goes_away_does_not_end_the_command(box: Box) -> None:
    body = run_body("sh", "-c", "echo started; sleep 0.5; echo done", wait=True, logs=True)
    with box.api.stream("POST", f"{box.path}/cmd", json=body) as answer:
        command = json.loads(next(answer.iter_lines()))["command"]
    path = f"{box.path}/cmd/{command['id']}"
    assert box.api.get(path, params={"wait": "true"}).json()["command"]["exitCode"] == 0
    assert text(lines(box.api.get(f"{path}/logs"))) == "started\ndone\n"


def test_the_head_of_a_stream_that_never_ends_is_answered_at_once(box: Box) -> None:
    command = box.start("sleep", "60")
    answer = box.api.head(f"{box.path}/cmd/{command['id']}/logs", timeout=30)
    assert (answer.status_code, answer.content) == (200, b"")


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as handle:
        return int(handle.read().split()[1]) * 4096


def test_a_reader_that_stalls_costs_the_server_no_memory(box: Box, server: Any) -> None:
    command = box.start("head", "-c", str(64 << 20), "/dev/zero")
    path = f"{box.path}/cmd/{command['id']}"
    box.api.get(path, params={"wait": "true"})
    before = resident(server.pid)
    host, _, port = server.url.removeprefix("http://").partition(":")
    request = f"GET {path}/logs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {server.token}\r\n\r\n"
    stalled = []
    try:
        for _ in range(4):
            sock = socket.create_connection((host, int(port)))
            sock.sendall(request.encode())
            stalled.append(sock)
        time.sleep(0.7)
        assert resident(server.pid) - before < 24 << 20
    finally:
        for sock in stalled:
            sock.close()


def test_a_look_at_the_head_does_not_wait_for_the_end(box: Box) -> None:
    command = box.start("sleep", "1000")
    began = time.monotonic()
    assert box.api.head(f"{box.path}/cmd/{command['id']}", params={"wait": "true"}).status_code == 200
    assert time.monotonic() - began < PATIENCE
