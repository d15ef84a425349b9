"""The vendor's Python client, unmodified, on both of its surfaces."""

from __future__ import annotations

import pytest

from tests.conformance.clients import Client, Server
from tests.conformance.expectations import PYTHON


@pytest.mark.parametrize("surface", ["async", "sync"])
@pytest.mark.parametrize("name", PYTHON)
def test_python(
    python_client: Client, server: Server, sources: dict[str, str], surface: str, name: str
) -> None:
    assert python_client.run(surface, name, server=server, env=sources).observed == PYTHON[name]
