"""Limits through the API: ours beside the words of official clients, and through a crash of the server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import create, scoped
from tests.server.server_process import PROJECT, ServerProcess, running_server


@pytest.fixture(scope="module")
def server(able: None) -> Iterator[ServerProcess]:
    """One that a test may kill, with limits of the operator's own."""
    with running_server(settings={"pids": 500, "disk_bytes": 1 << 30}) as server:
        yield server


def shown(api: httpx.Client, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    answer = api.get(f"/v2/sandboxes/{name}", params=scoped()).json()
    return answer["sandbox"], answer["session"]


def test_what_official_clients_read_keeps_its_shape(api: httpx.Client) -> None:
    for body in ({}, {"resources": {"vcpus": 4, "memory": 8192}}):
        box = create(api, **body)
        for found in (box.created["sandbox"], box.created["session"]):
            assert found["memory"] == 2048 * found["vcpus"] and "resources" not in found
    asked = {"cpus": 0.5, "memoryMb": 256, "diskMb": 512, "pids": 100}
    box = create(api, resources=asked)
    for found in (box.created["sandbox"], box.created["session"]):
        assert (found["vcpus"], found["memory"], found["resources"]) == (1, 256, asked)
        assert type(found["vcpus"]) is int
    assert box.created["session"]["limits"]["disk"] in ("enforced", "watched")
    change = api.patch(f"/v2/sandboxes/{box.name}", params=scoped(), json={"resources": {"vcpus": 4}})
    assert change.status_code == 200, change.text
    sandbox, session = shown(api, box.name)
    assert (sandbox["vcpus"], sandbox["memory"]) == (4, 8192) and "resources" not in sandbox
    assert session["resources"] == asked


def test_limits_outlive_a_killed_server(server: ServerProcess, api: httpx.Client) -> None:
    asked = {"cpus": 1.5, "memoryMb": 100, "diskMb": 1000, "pids": 99}
    box = create(api, resources=asked)
    server.stop(signal.SIGKILL)
    server.start()
    sandbox, session = shown(api, box.name)
    assert sandbox["resources"] == session["resources"] == asked
    assert session["id"] == box.session and session["status"] == "running"
    assert api.post(f"{box.path}/stop", json={}).status_code == 200
    again = api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true")).json()
    assert again["session"]["id"] != box.session
    assert again["session"]["resources"] == again["sandbox"]["resources"] == asked


def test_what_is_out_of_bounds_is_refused_by_name(api: httpx.Client) -> None:
    box = create(api)
    for resources, field in (
        ({"cpus": 0.01}, "cpus"),
        ({"memoryMb": 32}, "memoryMb"),
        ({"diskMb": 0}, "diskMb"),
        ({"pids": 3}, "pids"),
        ({"pids": 501}, "pids"),  # the operator's
        ({"diskMb": 1025}, "diskMb"),
        ({"vcpus": 2, "pids": 100}, "vcpus"),
        ({"memory": 4096, "memoryMb": 4096}, "memory"),
    ):
        body = {"projectId": PROJECT, "resources": resources}
        for answer in (
            api.post("/v3/sandboxes", params=scoped(), json=body),
            api.post(f"/v2/sandboxes/{box.name}/fork", params=scoped(), json=body),
            api.patch(f"/v2/sandboxes/{box.name}", params=scoped(), json={"resources": resources}),
        ):
            assert answer.status_code == 400, (resources, answer.text)
            assert answer.json()["error"]["details"]["field"] == f"resources.{field}"
    assert "resources" not in shown(api, box.name)[0]
