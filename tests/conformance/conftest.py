"""The clients under test, and the server they talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandkeep.host import doctor
from tests.conformance.clients import NAMES, cli_client, node_client, python_client, sources
from tests.server.server_process import ServerProcess, running_server

__all__ = ["cli_client", "node_client", "python_client", "sources"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server on loopback, with a token every client accepts."""
    report = doctor.probe(str(tmp_path_factory.mktemp("probe")))
    if not report.can_run:
        lacking = [found.name for found in report.findings if found.required and found.status == "missing"]
        pytest.skip(f"sessions cannot run here: no {', '.join(lacking)}")
    # What clients start from, and what sandboxes reach, is on loopback too.
    network = {
        "names": {name: ["127.0.0.1"] for name in NAMES},
        "allowed": ["127.0.0.0/8"],
        "ingress_port": 0,
    }
    with running_server(settings={"private_sources": True, "network": network}) as server:
        yield server
