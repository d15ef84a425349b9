"""Tokens that tell the receiver of a forwarded request whose it is: RS256 JSON Web Tokens.

Whoever receives one verifies it with the public key published in the form of ``jwks``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any, Final

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

_LIFE_SECONDS: Final = 300


def make_key() -> bytes:
    """A new private key, PEM."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _number(value: int) -> str:
    return _text(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def jwks(key: bytes) -> dict[str, Any]:
    """The public half of a private key, as a JSON Web Key Set."""
    loaded = serialization.load_pem_private_key(key, None)
    assert isinstance(loaded, rsa.RSAPrivateKey)
    numbers = loaded.public_key().public_numbers()
    public = {"kty": "RSA", "n": _number(numbers.n), "e": _number(numbers.e)}
    return {"keys": [{**public, "use": "sig", "alg": "RS256", "kid": _key_id(public)}]}


def _key_id(public: Mapping[str, str]) -> str:
    members = json.dumps({name: public[name] for name in ("e", "kty", "n")}, separators=(",", ":"))
    return _text(hashlib.sha256(members.encode()).digest())


class Signer:
    def __init__(self, key: bytes, issuer: str) -> None:
        loaded = serialization.load_pem_private_key(key, None)
        assert isinstance(loaded, rsa.RSAPrivateKey)
        self._key = loaded
        self._issuer = issuer
        self._id = jwks(key)["keys"][0]["kid"]

    def token(self, *, audience: str, claims: Mapping[str, Any]) -> str:
        now = int(time.time())
        header = {"alg": "RS256", "typ": "JWT", "kid": self._id}
        body = {
            **claims,
            "iss": self._issuer,
            "aud": audience,
            "iat": now,
            "nbf": now,
            "exp": now + _LIFE_SECONDS,
        }
        parts = [_text(json.dumps(part, separators=(",", ":")).encode()) for part in (header, body)]
        signed = ".".join(parts)
        signature = self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{signed}.{_text(signature)}"
