"""The installation's certificate authority, and TLS contexts for domains whose requests are inspected.

The authority is made once per installation by ``make_authority``; its private key is given to netd in memory.
Certificates for names are made when first needed and kept, few of them, in memory too: the one file OpenSSL
insists on reading lives for a moment in netd's own empty root.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections import OrderedDict
from ipaddress import ip_address
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_YEARS: Final = 10
_LEAF_DAYS: Final = 30
_MOST_LEAVES: Final = 256
_SYSTEM_BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


def make_authority(name: str) -> tuple[bytes, bytes]:
    """Return a new certificate authority: certificate and private key, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), _private(key)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class Leaves:
    """TLS contexts by server name, each with a certificate of the installation's authority."""

    def __init__(self, certificate: bytes, key: bytes) -> None:
        self._issuer = x509.load_pem_x509_certificate(certificate)
        loaded = serialization.load_pem_private_key(key, None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        self._key = loaded
        self._contexts: OrderedDict[str, tuple[datetime.datetime, ssl.SSLContext]] = OrderedDict()

    def context(self, name: str) -> ssl.SSLContext:
        now = datetime.datetime.now(datetime.UTC)
        found = self._contexts.get(name)
        if found is None or found[0] < now:
            # Renewed well before a client would see it expire.
            found = (now + datetime.timedelta(days=_LEAF_DAYS // 2), self._make(name, now))
            self._contexts[name] = found
            while len(self._contexts) > _MOST_LEAVES:
                self._contexts.popitem(last=False)
        self._contexts.move_to_end(name)
        return found[1]

    def _make(self, name: str, now: datetime.datetime) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._issuer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=_LEAF_DAYS))
            .add_extension(x509.SubjectAlternativeName([_general_name(name)]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2", "http/1.1"])
        _load(context, certificate.public_bytes(serialization.Encoding.PEM) + _private(key))
        return context


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    path = f"/leaf-{os.getpid()}.pem"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as handle:
            handle.write(pem)
        context.load_cert_chain(path)
    finally:
        os.unlink(path)


def upstream_context() -> ssl.SSLContext:
    """Return a context for connections to servers, with the authorities this machine trusts now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    bundle = system_bundle()
    if bundle:
        context.load_verify_locations(cadata=bundle)
    return context


def system_bundle() -> str:
    """Return the certificates of the authorities this machine trusts, as PEM."""
    paths = ssl.get_default_verify_paths()
    for path in (*_SYSTEM_BUNDLES, paths.openssl_cafile):
        try:
            with open(path, encoding="utf-8", errors="ignore") as handle:
                return handle.read()
        except OSError:
            continue
    return ""
