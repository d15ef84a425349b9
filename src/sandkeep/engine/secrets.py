"""Secrets by logical name: sealed in the store, never returned; opened for netd and for processes.

Values are sealed with AES-GCM under a key of the installation, bound to project and name, so that a row
copied to another project or name cannot be opened.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from sandkeep.checks import byte_length
from sandkeep.engine.sealing import Seal, Unopened
from sandkeep.engine.services import Services
from sandkeep.errors import InvalidRequest, NotFound, StoreError
from sandkeep.net.secrets import NAME

_LARGEST = 64 << 10


class Secret(NamedTuple):
    """The facts that are shown about a secret."""

    name: str
    created_ms: int
    updated_ms: int


class Secrets:
    """Secrets of all projects. ``changed`` is awaited with project and name after one was set or removed."""

    def __init__(self, services: Services, changed: Callable[[str, str], Awaitable[None]]) -> None:
        self._services = services
        self._changed = changed
        self._store = services.store.secrets
        self._seal = Seal(services.data_dir, "secrets")

    async def set(self, project: str, name: str, value: str) -> Secret:
        """Store a value, and pass it to netd for running sessions whose policy refers to it."""
        if not NAME.fullmatch(name):
            raise InvalidRequest("a secret's name has letters, digits, '_', '.' and '-'", field="name")
        if not value or "\0" in value or byte_length("value", value) > _LARGEST:
            raise InvalidRequest("a secret is text without NUL, up to 64 KiB", field="value")
        sealed = self._seal.seal(value, _binding(project, name))
        with self._services.store.transaction():
            self._store.put(project, name, sealed, now_ms=self._services.now_ms())
            self._services.record("secret.set", project, name=name)
        await self._changed(project, name)
        row = self._store.find(project, name)
        assert row is not None
        return Secret(row.name, row.created_ms, row.updated_ms)

    def list(self, project: str) -> list[Secret]:
        """Return the secrets of a project, without their values."""
        return [Secret(row.name, row.created_ms, row.updated_ms) for row in self._store.all(project)]

    async def remove(self, project: str, name: str) -> None:
        """Delete a value. netd refuses requests whose rules refer to it from now on."""
        with self._services.store.transaction():
            self._store.delete(project, name)
            self._services.record("secret.removed", project, name=name)
        await self._changed(project, name)

    def exists(self, project: str, name: str) -> bool:
        return self._store.find(project, name) is not None

    def open(self, project: str, name: str) -> str:
        """Return the value, for netd or a process."""
        row = self._store.find(project, name)
        if row is None:
            raise NotFound(f"no secret named {name}", kind="secret", name=name)
        try:
            return self._seal.open(row.sealed, _binding(project, name))
        except Unopened:
            raise StoreError(
                f"the secret {name} was sealed with another installation's key",
                path=self._services.data_dir,
                hint="restore keys/master, or set the secret again",
            ) from None

    def open_for_header(self, project: str, name: str) -> str:
        """Return the value, for a header. Raises `InvalidRequest` if it does not fit into one."""
        value = self.open(project, name)
        if not _fits_header(value):
            raise InvalidRequest(
                f"the secret {name} does not fit into an HTTP header: that is one line of Latin-1",
                field="secret",
            )
        return value


def _fits_header(value: str) -> bool:
    try:
        value.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return not any(c in value for c in "\r\n")


def _binding(project: str, name: str) -> str:
    return f"{project}\0{name}"
