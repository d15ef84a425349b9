"""Taking over a data directory without serving it, for users whose server is started by clients."""

from __future__ import annotations

import os

from sandkeep.engine.adoption import Adopted
from sandkeep.engine.engine import Engine
from sandkeep.server.configuration import read_settings
from sandkeep.server.serve import take_lock


async def adopt(data_dir: str) -> list[Adopted]:
    """Open and close the data directory. Raises `Conflict` if a server runs on it."""
    lock = take_lock(data_dir)
    try:
        engine = await Engine.open(data_dir, settings=read_settings(data_dir, None), adopt=True)
        await engine.close()
        return engine.adopted
    finally:
        os.close(lock)
