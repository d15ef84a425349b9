"""JSON Web Tokens in their compact form: header, claims and signature, each in base64url.

The one encoder for tokens of the API (HS256) and for those netd adds to forwarded requests (RS256, whose keys
are in ``net.tokens``). PyJWT would be a dependency of every installation, for these few lines.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any


def encode(header: Mapping[str, str], claims: Mapping[str, Any], sign: Callable[[bytes], bytes]) -> str:
    """Return a token; ``sign`` makes the signature that ``header["alg"]`` names."""
    signed = ".".join(base64url(_compact(part)) for part in ({"typ": "JWT", **header}, claims))
    return f"{signed}.{base64url(sign(signed.encode()))}"


def sign_hs256(key: bytes, claims: Mapping[str, Any]) -> str:
    """Return a token signed with a secret key."""
    return encode({"alg": "HS256"}, claims, lambda signed: hmac.digest(key, signed, hashlib.sha256))


def verify_hs256(key: bytes, text: str, *, at_ms: int) -> dict[str, Any] | None:
    """Return the claims of a token signed with ``key`` that has not expired, otherwise ``None``.

    The token's own header is not consulted: it cannot choose another algorithm.
    """
    signed, _, signature = text.rpartition(".")
    expected = base64url(hmac.digest(key, signed.encode(), hashlib.sha256))
    if not hmac.compare_digest(expected.encode(), signature.encode()):
        return None
    payload = signed.partition(".")[2]
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except ValueError:
        return None
    if not isinstance(claims, dict) or not isinstance(claims.get("exp"), int):
        return None
    return claims if claims["exp"] * 1000 > at_ms else None


def base64url(data: bytes) -> str:
    """Encode without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def thumbprint(key: Mapping[str, str]) -> str:
    """Return the id of an RSA public key (RFC 7638)."""
    members = {name: key[name] for name in ("e", "kty", "n")}
    return base64url(hashlib.sha256(_compact(members)).digest())


def _compact(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
