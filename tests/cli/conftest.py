"""A server reached over TCP with a token, the program that uses it, and sandboxes that go away."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from sandkeep.host import doctor
from tests.cli.program import Program
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


@pytest.fixture(scope="package")
def cli(server: ServerProcess) -> Program:
    return Program({"SANDKEEP_URL": server.url, "SANDKEEP_TOKEN": server.token})


@pytest.fixture(scope="package")
def local(server: ServerProcess) -> Program:
    """The same server over its unix socket, as the user it runs as."""
    return Program({"SANDKEEP_URL": f"unix://{server.socket}"})


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"t-{secrets.token_hex(4)}"


@pytest.fixture
def box(cli: Program, name: str) -> Iterator[str]:
    """A running sandbox."""
    cli("create", "--name", name)
    yield name
    cli("rm", "--delete-orphan-snapshots", name)
