"""The store's own files: locks, atomic replacement, and removal of whole trees."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def locked(path: str, *, shared: bool = False) -> Iterator[None]:
    """Hold a file lock; freed by the kernel when its holder dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def read_json(path: str) -> Any:
    with open(path, encoding="utf-8") as source:
        return json.load(source)


def write_json(path: str, body: Any) -> None:
    """Replace ``path`` as a whole: readers see the old content or the new."""
    temporary = f"{path}.{threading.get_native_id()}.new"
    with open(temporary, "w", encoding="utf-8") as out:
        json.dump(body, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    os.rename(temporary, path)


def remove_tree(path: str) -> None:
    """Remove a directory whatever the modes of what is in it; absent is fine."""

    def retry(function: Any, failed: str, _error: Any) -> None:
        # Without CAP_DAC_OVERRIDE over a tree (a layer's own 0555 directories) the parent must be opened up.
        parent = os.path.dirname(failed)
        for directory in (parent, failed):
            if os.path.isdir(directory) and not os.path.islink(directory):
                os.chmod(directory, stat.S_IRWXU)
        function(failed)

    if os.path.lexists(path):
        shutil.rmtree(path, onerror=retry)
