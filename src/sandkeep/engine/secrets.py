"""Secrets by logical name: sealed in the store, opened for netd only, never returned.

Sealed with AES-GCM under a key of the installation, bound to project and name, so that a row copied to
another project or name does not open.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from sandkeep.engine import keys
from sandkeep.errors import HostCannot, InvalidRequest, NotFound, StoreError
from sandkeep.net.secrets import NAME

if TYPE_CHECKING:
    from sandkeep.engine.context import Context

_NONCE = 12
_LARGEST = 64 << 10


class Secret(NamedTuple):
    """What may be known about a secret."""

    name: str
    created_ms: int
    updated_ms: int


class Secrets:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store.secrets

    async def set(self, project: str, name: str, value: str) -> Secret:
        """Store a value, and put it in force where a running session's policy refers to it."""
        if not NAME.fullmatch(name):
            raise InvalidRequest("a secret's name has letters, digits, '_', '.' and '-'", field="name")
        if not value or len(value) > _LARGEST or any(c in value for c in "\r\n\0"):
            raise InvalidRequest("a secret is one line of text, up to 64 KiB", field="value")
        try:
            value.encode("latin-1")
        except UnicodeEncodeError:
            raise InvalidRequest("a secret has to fit into an HTTP header (Latin-1)", field="value") from None
        nonce = os.urandom(_NONCE)
        sealed = nonce + self._cipher().encrypt(nonce, value.encode(), _binding(project, name))
        self._store.put(project, name, sealed, now_ms=self._context.now_ms())
        self._context.record("secret.set", project, name=name)
        await self._context.network.refresh_secret(project, name)
        found = self._store.find(project, name)
        assert found is not None
        return Secret(found.name, found.created_ms, found.updated_ms)

    def list(self, project: str) -> list[Secret]:
        return [Secret(row.name, row.created_ms, row.updated_ms) for row in self._store.all(project)]

    async def remove(self, project: str, name: str) -> None:
        """Forget a value. Requests whose rules refer to it are refused from now on."""
        self._store.delete(project, name)
        self._context.record("secret.removed", project, name=name)
        await self._context.network.refresh_secret(project, name)

    def exists(self, project: str, name: str) -> bool:
        return self._store.find(project, name) is not None

    def open(self, project: str, name: str) -> str:
        """The value, for netd."""
        from cryptography.exceptions import InvalidTag

        row = self._store.find(project, name)
        if row is None:
            raise NotFound(f"no secret named {name}", kind="secret", name=name)
        nonce, sealed = row.sealed[:_NONCE], row.sealed[_NONCE:]
        try:
            return self._cipher().decrypt(nonce, sealed, _binding(project, name)).decode()
        except InvalidTag:
            raise StoreError(
                f"the secret {name} was sealed with another installation's key",
                path=self._context.data_dir,
                hint="restore keys/master, or set the secret again",
            ) from None

    def _cipher(self) -> AESGCM:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM as Cipher
        except ImportError:
            raise HostCannot(
                "secrets cannot be sealed on this server",
                hint="install sandkeep[net]",
                part="secrets",
                why="the cryptography package is not installed",
            ) from None
        return Cipher(keys.derive(self._context.data_dir, "secrets"))


def _binding(project: str, name: str) -> bytes:
    return f"{project}\0{name}".encode()


if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
