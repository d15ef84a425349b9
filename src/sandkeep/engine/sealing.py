"""Seal values that must not be in the store in plain text: AES-GCM under a key of the installation.

Each sealed value is bound to its purpose, so that it cannot be opened in a row copied to another place.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sandkeep.engine import keys
from sandkeep.errors import HostCannot

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE = 12


class Unopened(Exception):
    """The value was sealed for something else, or with another key."""


class Seal:
    """Seals and opens values for one purpose. The key is read on first use."""

    def __init__(self, data_dir: str, purpose: str) -> None:
        self._data_dir = data_dir
        self._purpose = purpose

    def seal(self, value: str, binding: str) -> bytes:
        """Return the sealed form of a value."""
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher().encrypt(nonce, value.encode(), binding.encode())

    def open(self, sealed: bytes, binding: str) -> str:
        """Return the plain value. Raises ``Unopened``."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher().decrypt(sealed[:_NONCE], sealed[_NONCE:], binding.encode()).decode()
        except (InvalidTag, ValueError):
            raise Unopened from None

    def _cipher(self) -> AESGCM:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM as Cipher
        except ImportError:
            raise HostCannot(
                f"{self._purpose} cannot be sealed on this server",
                hint="install sandkeep[net]",
                part=self._purpose,
                why="the cryptography package is not installed",
            ) from None
        return Cipher(keys.derive(self._data_dir, self._purpose))
