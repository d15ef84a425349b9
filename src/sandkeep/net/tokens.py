"""Tokens that tell the receiver of a forwarded request which session it comes from: RS256 JSON Web Tokens.

The receiver verifies them with the public key that ``jwks`` publishes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from sandkeep.shared import jwt

_LIFE_SECONDS: Final = 300


def make_key() -> bytes:
    """Return a new private key, PEM."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _number(value: int) -> str:
    return jwt.base64url(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def jwks(key: bytes) -> dict[str, Any]:
    """Return the public half of a private key, as a JSON Web Key Set."""
    loaded = serialization.load_pem_private_key(key, None)
    assert isinstance(loaded, rsa.RSAPrivateKey)
    numbers = loaded.public_key().public_numbers()
    public = {"kty": "RSA", "n": _number(numbers.n), "e": _number(numbers.e)}
    return {"keys": [{**public, "use": "sig", "alg": "RS256", "kid": jwt.thumbprint(public)}]}


class Signer:
    def __init__(self, key: bytes, issuer: str) -> None:
        loaded = serialization.load_pem_private_key(key, None)
        assert isinstance(loaded, rsa.RSAPrivateKey)
        self._key = loaded
        self._issuer = issuer
        self._header = {"alg": "RS256", "kid": jwks(key)["keys"][0]["kid"]}

    def token(self, *, audience: str, claims: Mapping[str, Any]) -> str:
        """Return a token with ``claims`` for the receiver ``audience``, valid for five minutes."""
        now = int(time.time())
        times = {"iat": now, "nbf": now, "exp": now + _LIFE_SECONDS}
        body = {**claims, "iss": self._issuer, "aud": audience, **times}
        return jwt.encode(self._header, body, self._sign)

    def _sign(self, signed: bytes) -> bytes:
        return self._key.sign(signed, padding.PKCS1v15(), hashes.SHA256())
