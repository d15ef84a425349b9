"""Remove a data directory, with everything that runs in it.

Works on any remainder: a complete directory with a server and running sessions, one whose store is damaged or
whose server cannot start, one that is half removed, and processes whose directory is gone.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from sandkeep.errors import Conflict, HostCannot, SandkeepError
from sandkeep.host import datadir
from sandkeep.host.native.driver import NativeDriver
from sandkeep.host.remover import DISKS_OWN, Remover

_LOCKS: Final = ("start.lock", "server.lock")
"""The holder of the first lock may start a server; the holder of the second is one."""
_STOP_SECONDS: Final = 20.0


def uninstall(directory: str, *, doing: Callable[[str], None]) -> str | None:
    """End what runs in ``directory`` and remove it; `datadir.check` has accepted it.

    Return why the directory itself is left, empty, where only the owner of its parent may remove it.

    Raises:
        Conflict: a process of it does not end, or a server was started during the removal.
        HostCannot: part of it is left, since this user has no rights over it.
    """
    real = os.path.realpath(directory)
    places = dict.fromkeys((directory, real))
    with ExitStack() as held:
        if os.path.isdir(real):
            held.enter_context(_lock(real, "start.lock"))
            doing("Ending the server")
            if (server := datadir.server_of(real)) is not None:
                datadir.end_server(server)
            held.enter_context(_lock(real, "server.lock"))
            doing("Stopping sandboxes")
            asyncio.run(_stop_sessions(real))
        doing("Ending processes")
        for place in places:
            if left := datadir.end_processes(place):
                names = ", ".join(f"{process.what} ({process.pid})" for process in left)
                raise Conflict(f"{place} is still in use: {names}", hint="end them and run this again")
        doing("Removing files")
        stays = _remove(real)
    if os.path.islink(directory) and not stays:
        os.unlink(directory)
    return stays


async def _stop_sessions(directory: str) -> None:
    """Stop sessions as `sandkeep stop` does, without keeping files; those that fail are killed later."""
    driver = NativeDriver(directory)
    for ref in await driver.sessions():
        if driver.alive(ref.session):
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await driver.stop(ref, reason="uninstalled")
                    await driver.forget(ref)
            except (SandkeepError, OSError, TimeoutError):
                continue
    await driver.close()


def _remove(directory: str) -> str | None:
    with Remover() as remover:
        failures = remover.remove(directory, last=_LOCKS)
    if not failures:
        return None
    if set(os.listdir(directory)) <= {DISKS_OWN}:
        # A mount point, or in a directory of another user.
        return failures[0].rpartition(": ")[2]
    why = f"{failures[0]}" + (f", and {len(failures) - 1} more" if len(failures) > 1 else "")
    raise HostCannot(
        f"{directory} could not be removed entirely: {why}",
        part="uninstall",
        why=remover.lacks or why,
        hint=remover.lacks or f"run it as root with --data-dir {directory}",
    )


@contextmanager
def _lock(directory: str, name: str) -> Iterator[None]:
    """Hold a lock file of the directory, so that no client starts a server during the removal."""
    path = os.path.join(directory, name)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield  # the disk is full or read-only, so no server can start either
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"another command starts or stops the server of {directory}", hint="try again in a moment"
            ) from None
        yield
    finally:
        os.close(fd)
