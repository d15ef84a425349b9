"""A real server for the SDK, named by the environment as a program would find it; every test per colour."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from sandkeep.host import doctor
from tests.server.server_process import ServerProcess, running_server


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


@pytest.fixture(autouse=True)
def environment(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDKEEP_URL", f"unix://{server.socket}")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def name() -> str:
    """A name nobody else uses."""
    return f"t-{secrets.token_hex(4)}"
