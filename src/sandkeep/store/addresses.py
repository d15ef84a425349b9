"""Assign each declared port of a sandbox a number that no other port of this installation has.

The engine derives a loopback address from it. The number is a hash of the sandbox's id and the port, so that
a port that is removed and declared again gets the same number; if another port has it already, the next
candidate of a fixed sequence is taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from sandkeep.store.database import Database

SPACE: Final = 64 * 256 * 254
_ATTEMPTS: Final = 64


def assign(db: Database, sandbox: str, ports: Iterable[int]) -> None:
    """Give exactly these ports of a sandbox a number. Ports that have one keep it."""
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
