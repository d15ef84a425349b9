"""Drives the vendor's Python client through one scenario and prints what it saw, as JSON.

``scenarios.py async|sync NAME``, with the server and credentials in the environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from importlib import import_module

from tests.conformance.py.bench import SCENARIOS, Bench, connect

for _module in ("lifecycle", "processes", "files", "history", "network"):
    import_module(f"tests.conformance.py.{_module}")


async def main(surface: str, name: str) -> None:
    blocking = surface == "sync"
    client = connect(os.environ["SANDBOX_SERVER"], blocking=blocking)
    observed = await SCENARIOS[name](Bench(client, blocking=blocking))
    print(json.dumps(observed))


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1], sys.argv[2]))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
