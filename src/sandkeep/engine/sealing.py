"""What must not lie in the store in plain text: sealed with AES-GCM under a key of the installation.

Each is bound to what it is for, so that a row copied to another place does not open there.
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
    """It was sealed for something else, or with another key."""


class Seal:
    """Seals and opens for one purpose. The key is read when it is first needed."""

    def __init__(self, data_dir: str, purpose: str) -> None:
        self._data_dir = data_dir
        self._purpose = purpose

    def seal(self, value: str, binding: str) -> bytes:
        """What may be written down of a value."""
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher().encrypt(nonce, value.encode(), binding.encode())

    def open(self, sealed: bytes, binding: str) -> str:
        """The value again. Raises ``Unopened``."""
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
