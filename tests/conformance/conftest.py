"""The clients under test, and the server they talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandkeep.host import doctor
from tests.conformance.clients import Server, cli_client, node_client, python_client, sources
from tests.server.harness import running_server

__all__ = ["cli_client", "node_client", "python_client", "sources"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server on loopback, with a token every client accepts."""
    report = doctor.probe(str(tmp_path_factory.mktemp("probe")))
    if not report.can_run:
        lacking = [found.name for found in report.findings if found.required and found.status == "missing"]
        pytest.skip(f"sessions cannot run here: no {', '.join(lacking)}")
    # The git repository and the tarball that clients start from are on loopback too.
    with running_server(settings={"private_sources": True}) as server:
        yield server
