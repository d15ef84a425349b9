"""Log records that say what a slow start of a sandbox is waiting for.

The first sandbox on a machine waits some seconds for the host image. If the program has logging enabled for
INFO, the logger ``sandkeep`` gets a record then; any other program pays nothing for this.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sandkeep.sdk.target import Target

if TYPE_CHECKING:
    import logging

LOGGER: Final = "sandkeep"
_MESSAGES: Final = {"host image": "building the host image (once, and again after package changes)"}
_EVERY: Final = 0.4
"""Seconds between two polls. Most starts are over before the first."""
_SECONDS: Final = 5.0


@contextmanager
def watched(target: Target) -> Iterator[None]:
    """Log what a start waits for while the block runs. Errors of the polling are ignored."""
    logger = _listened_to()
    if logger is None:
        yield
        return
    over = threading.Event()
    threading.Thread(target=_watch, args=(target, logger, over), name="preparing", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _listened_to() -> logging.Logger | None:
    if "logging" not in sys.modules:
        return None  # not imported, so not configured
    import logging

    logger = logging.getLogger(LOGGER)
    return logger if logger.isEnabledFor(logging.INFO) else None


def _watch(target: Target, logger: logging.Logger, over: threading.Event) -> None:
    while not over.wait(_EVERY):
        try:
            what = _version(target).get("preparing")
        except Exception:
            continue
        if what and not over.is_set():
            logger.info(_MESSAGES.get(what, f"making the {what}"))
            return


def _version(target: Target) -> dict[str, Any]:
    """Get ``/version`` on a connection of its own: the pooled ones belong to an event loop."""
    if target.socket is not None:
        from sandkeep.embedded import ask

        reply = ask(os.path.dirname(target.socket), "GET", "/version", seconds=_SECONDS)
        return reply[1] if reply is not None else {}
    import json
    from urllib.request import ProxyHandler, build_opener

    with build_opener(ProxyHandler({})).open(f"{target.url}/version", timeout=_SECONDS) as response:
        found: dict[str, Any] = json.load(response)
        return found
