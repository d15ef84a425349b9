"""Reading a data directory without serving it: for the command line."""

import os

from sandkeep.engine.inspection import Problem, inspect
from sandkeep.store.counting import Counts, count
from sandkeep.store.identity import STORE, count_contents

__all__ = ["Counts", "Problem", "count_rows", "inspect"]


def count_rows(data_dir: str) -> Counts | None:
    """Count what the store knows; ``None`` if it is missing, damaged, or locked by a server."""
    store = os.path.join(data_dir, STORE)
    if not os.path.exists(store) and not any(count_contents(data_dir)):
        return Counts(0, 0, 0)
    return count(store)
