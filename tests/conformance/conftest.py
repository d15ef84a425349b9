"""The clients under test, and the server they talk to."""

from __future__ import annotations

import pytest

from tests.conformance.clients import Server, cli_client, node_client, python_client, sources

__all__ = ["cli_client", "node_client", "python_client", "sources"]


@pytest.fixture(scope="session")
def server() -> Server:
    """A real server on loopback, with a token every client accepts."""
    pytest.skip("there is no server to talk to in this tree")
