"""A number for each declared port of a sandbox, which no other port of this installation has.

The engine makes a loopback address of it. The number comes from the sandbox's id and the port, so that a port
that goes and comes back has it again; where another port has it already, from the next of a fixed sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from sandkeep.store.database import Database

SPACE: Final = 64 * 256 * 254
_ATTEMPTS: Final = 64


def assign(db: Database, sandbox: str, ports: Iterable[int]) -> None:
    """Have these ports of a sandbox numbered, and no others. Those that are numbered keep their numbers."""
    wanted = set(ports)
    has = {int(port) for (port,) in db.all("SELECT port FROM addresses WHERE sandbox = $1", sandbox)}
    for port in has - wanted:
        db.run("DELETE FROM addresses WHERE sandbox = $1 AND port = $2", sandbox, port)
    for port in sorted(wanted - has):
        for attempt in range(_ATTEMPTS):
            number = _candidate(sandbox, port, attempt)
            if db.one("SELECT port FROM addresses WHERE number = $1", number) is None:
                db.run(
                    "INSERT INTO addresses (number, sandbox, port) VALUES ($1, $2, $3)", number, sandbox, port
                )
                break


def _candidate(sandbox: str, port: int, attempt: int) -> int:
    digest = hashlib.sha256(f"{sandbox} {port} {attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % SPACE
