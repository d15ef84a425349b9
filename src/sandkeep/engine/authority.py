"""The installation's certificate authority and token key, and how sessions come to trust the authority.

Both keys are created once and kept below the data directory, readable by its owner only. A session trusts the
authority as soon as its policy has rules: the certificate is added to its system store, which most programs
use, and named in the variables that others use. It stays in the session's files, snapshots included; only
this installation can use it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from importlib.util import find_spec
from typing import Final

from sandkeep.engine import keys
from sandkeep.errors import PathError
from sandkeep.host.driver import Acting, Driver, SessionRef, WriteOptions

_COMMON_NAME: Final = "sandkeep egress authority"
_BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
)
_CERTIFICATE: Final = "/usr/local/share/ca-certificates/sandkeep.crt"
_TRUST_STORE: Final = "/usr/local/share/ca-certificates/sandkeep.p12"
_TRUST_STORE_PASSWORD: Final = "changeit"
_LARGEST_BUNDLE: Final = 16 << 20
_ROOT: Final = Acting(root=True)
_BUNDLE_VARIABLES: Final = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
)


def available() -> bool:
    """Return whether this server can apply rules."""
    return find_spec("cryptography") is not None and find_spec("h2") is not None


class Authority:
    def __init__(self, data_dir: str) -> None:
        from sandkeep.net import tls, tokens

        directory = os.path.join(data_dir, "ca")
        os.makedirs(directory, mode=0o700, exist_ok=True)
        pem = _kept(
            os.path.join(directory, "authority.pem"), lambda: b"".join(tls.make_authority(_COMMON_NAME))
        )
        end = pem.index(b"-----END CERTIFICATE-----") + len(b"-----END CERTIFICATE-----\n")
        self.certificate, self.key = pem[:end], pem[end:]
        self.token_key = _kept(os.path.join(directory, "token.pem"), tokens.make_key)
        self.jwks = tokens.jwks(self.token_key)
        self._java: bytes | None = None

    # --- inside a session --------------------------------------------------------------------------------

    async def install(self, driver: Driver, ref: SessionRef) -> None:
        """Make a session's system store trust the authority; safe to repeat."""
        bundles = 0
        complete = True
        content: bytes | None
        for path in _BUNDLES:
            try:
                content = await _read(driver, ref, path)
            except PathError:
                continue  # missing: the path of another system
            bundles += 1
            if content is None:
                continue  # the session changed it; it must trust the authority by other means
            if self.certificate not in content:
                complete = False
                content = content.rstrip(b"\n") + b"\n" + self.certificate
                await _write(driver, ref, path, content)
        if bundles and complete:
            return
        if not bundles:
            from sandkeep.net import tls

            content = tls.system_bundle().encode() + self.certificate
            await _write(driver, ref, _BUNDLES[0], content)
        await _write(driver, ref, _CERTIFICATE, self.certificate)
        # OpenSSL looks up certificates by this name where it has no bundle.
        await _write(driver, ref, f"/etc/ssl/certs/{_subject_hash()}.0", self.certificate)
        await _write(driver, ref, _TRUST_STORE, await self._java_store())

    async def _java_store(self) -> bytes:
        """Return a trust store for Java: the machine's authorities, not a session's own, and this one."""
        if self._java is None:
            from sandkeep.net import tls

            make = partial(_java_trust_store, tls.system_bundle().encode() + self.certificate)
            self._java = await asyncio.get_running_loop().run_in_executor(None, make)
        return self._java

    def environment(self) -> dict[str, str]:
        """Return variables for programs that have their own list of authorities."""
        java = (
            f"-Djavax.net.ssl.trustStore={_TRUST_STORE} -Djavax.net.ssl.trustStoreType=PKCS12"
            f" -Djavax.net.ssl.trustStorePassword={_TRUST_STORE_PASSWORD}"
        )
        bundle = dict.fromkeys(_BUNDLE_VARIABLES, _BUNDLES[0])
        return {**bundle, "NODE_EXTRA_CA_CERTS": _CERTIFICATE, "JAVA_TOOL_OPTIONS": java}


def _kept(path: str, make: Callable[[], bytes]) -> bytes:
    try:
        with open(path, "rb") as handle:
            return handle.read()
    except FileNotFoundError:
        keys.write_private(path, make())
        return _kept(path, make)


def _subject_hash() -> str:
    """Return OpenSSL's hash of the authority's name, in canonical form: lower case, no outer sequence."""
    value = _COMMON_NAME.lower().encode()
    attribute = b"\x06\x03\x55\x04\x03" + b"\x0c" + bytes([len(value)]) + value
    sequence = b"\x30" + bytes([len(attribute)]) + attribute
    name = b"\x31" + bytes([len(sequence)]) + sequence
    return hashlib.sha1(name).digest()[3::-1].hex()


def _java_trust_store(bundle: bytes) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, pkcs12

    certificates = []
    mark = b"-----BEGIN CERTIFICATE-----"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for pem in bundle.split(mark)[1:]:
            try:
                certificates.append(x509.load_pem_x509_certificate(mark + pem))
            except (ValueError, Warning):
                continue  # an old authority that violates today's rules
    entries = [pkcs12.PKCS12Certificate(one, f"{i}".encode()) for i, one in enumerate(certificates)]
    return pkcs12.serialize_java_truststore(entries, BestAvailableEncryption(_TRUST_STORE_PASSWORD.encode()))


async def _read(driver: Driver, ref: SessionRef, path: str) -> bytes | None:
    """Return a file of a session; ``None`` when it is larger than any list of authorities."""
    opened = await driver.files(ref).open_read(path, _ROOT, length=_LARGEST_BUNDLE + 1)
    async with aclosing(opened):
        content = b"".join([piece async for piece in opened.pieces()])
    return content if len(content) <= _LARGEST_BUNDLE else None


async def _write(driver: Driver, ref: SessionRef, path: str, content: bytes) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield content

    await driver.files(ref).write(path, pieces(), _ROOT, WriteOptions(mode=0o644, parents=True))
