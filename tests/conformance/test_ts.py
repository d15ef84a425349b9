"""The vendor's JavaScript client, unmodified, in its current and its previous major version."""

from __future__ import annotations

import pytest

from tests.conformance.clients import Client, Server
from tests.conformance.expectations import NODE, NODE_3_ONLY


@pytest.mark.parametrize("name", NODE)
def test_node(node_client: Client, server: Server, sources: dict[str, str], name: str) -> None:
    if name in NODE_3_ONLY and not node_client.version.startswith("3."):
        pytest.skip(f"version {node_client.version} of the client does not have this")
    assert node_client.run(name, server=server, env=sources).observed == NODE[name]
