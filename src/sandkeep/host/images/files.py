"""The store's own files: locks and atomic replacement."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold a file lock; the kernel frees it when its holder dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def read_json(path: str) -> Any:
    with open(path, encoding="utf-8") as source:
        return json.load(source)


def write_json(path: str, body: Any) -> None:
    """Replace ``path`` atomically: readers see the old content or the new."""
    temporary = f"{path}.{threading.get_native_id()}.new"
    try:
        with open(temporary, "w", encoding="utf-8") as out:
            json.dump(body, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
