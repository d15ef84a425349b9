"""One server for all tests that do not stop it, and a running sandbox for each test that asks for one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from sandkeep.host import doctor
from tests.server.server_process import PROJECT, TEAM, ServerProcess, running_server


@pytest.fixture(scope="session")
def able(tmp_path_factory: pytest.TempPathFactory) -> None:
    report = doctor.probe(str(tmp_path_factory.mktemp("probe")))
    if not report.can_run:
        lacking = [found.name for found in report.findings if found.required and found.status == "missing"]
        pytest.skip(f"sessions cannot run here: no {', '.join(lacking)}")


@pytest.fixture(scope="package")
def server(able: None) -> Iterator[ServerProcess]:
    with running_server() as server:
        yield server


@pytest.fixture
def api(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@dataclass(frozen=True)
class Box:
    """A sandbox through the API."""

    api: httpx.Client
    name: str
    created: dict[str, Any]

    @property
    def session(self) -> str:
        return str(self.created["session"]["id"])

    @property
    def path(self) -> str:
        return f"/v2/sandboxes/sessions/{self.session}"

    @property
    def own(self) -> str:
        return f"/v1/sessions/{self.session}"

    def start(self, *command: str, **body: Any) -> dict[str, Any]:
        answer = self.api.post(f"{self.path}/cmd", json=run_body(*command, **body))
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["command"])

    def run(self, *command: str, **body: Any) -> httpx.Response:
        return self.api.post(f"{self.path}/cmd", json=run_body(*command, wait=True, logs=True, **body))


def run_body(command: str, *args: str, **more: Any) -> dict[str, Any]:
    return {"command": command, "args": list(args), **more}


def scoped(**more: Any) -> dict[str, Any]:
    return {"teamId": TEAM, "projectId": PROJECT, "project": PROJECT, **more}


def create(api: httpx.Client, **body: Any) -> Box:
    name = body.pop("name", f"t-{secrets.token_hex(4)}")
    answer = api.post("/v3/sandboxes", params=scoped(), json={"projectId": PROJECT, "name": name, **body})
    assert answer.status_code == 200, answer.text
    return Box(api, name, answer.json())


@pytest.fixture
def box(api: httpx.Client) -> Iterator[Box]:
    box = create(api)
    yield box
    api.delete(f"/v2/sandboxes/{box.name}", params=scoped(deleteOrphanSnapshots="true"))
