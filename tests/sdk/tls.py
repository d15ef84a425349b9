"""TLS in front of a server, as an operator's proxy puts it there, with an authority nobody knows."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PAGE = (
    b"HTTP/1.1 502 Bad Gateway\r\nServer: gateway\r\nContent-Type: text/html\r\n"
    b"Content-Length: 29\r\nConnection: close\r\n\r\n<html>502 Bad Gateway</html>\n"
)


class Authority:
    """Signs certificates; ``file`` is what clients need to believe them."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self._certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )

    def server_context(self) -> ssl.SSLContext:
        """For a server at 127.0.0.1."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        where = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = (
            self._builder(name, key).add_extension(where, critical=False).sign(self._key, hashes.SHA256())
        )
        held = self._directory / "server.pem"
        held.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(held)
        return context


class TlsFront:
    """Ends TLS and passes everything on to a server on this machine, while it is entered.

    ``gateway``: whoever asks while no server answers is told so with a page and status 502, as nginx does;
    otherwise the connection is closed.
    """

    def __init__(self, context: ssl.SSLContext, behind: str, *, gateway: bool = False) -> None:
        self._gateway = gateway
        host, _, port = behind.partition("://")[2].partition(":")
        self._behind = (host, int(port))
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> TlsFront:
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            _shut(connection)
        for thread in self._threads:
            thread.join(5)

    def _run(self, function: object, *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(raw)
            self._run(self._serve, raw)

    def _serve(self, raw: socket.socket) -> None:
        with raw:
            raw.settimeout(10)
            try:
                client = self._context.wrap_socket(raw, server_side=True)
            except (OSError, ssl.SSLError):
                return  # it does not believe us
            try:
                server = socket.create_connection(self._behind)
            except OSError:
                self._refuse(client)  # nobody is behind us for now
                client.close()
                return
            with client, server:
                client.settimeout(None)
                self._open += [client, server]
                unanswered = threading.Event()
                back = threading.Thread(target=self._back, args=(server, client, unanswered))
                back.start()
                _relay(client, server, unanswered.set)
                _shut(server)
                back.join()
                _shut(client)

    def _back(self, server: socket.socket, client: ssl.SSLSocket, unanswered: threading.Event) -> None:
        _relay(server, client, unanswered.clear)
        if unanswered.is_set() and self._gateway:
            _send_page(client)
        _shut(server)
        _shut(client)

    def _refuse(self, client: ssl.SSLSocket) -> None:
        try:
            if self._gateway and client.recv(1 << 16):
                _send_page(client)
        except (OSError, ssl.SSLError):
            pass
        _shut(client)


def _relay(source: socket.socket, target: socket.socket, seen: Callable[[], None]) -> None:
    try:
        while data := source.recv(1 << 16):
            seen()
            target.sendall(data)
    except (OSError, ssl.SSLError):
        pass


def _send_page(client: ssl.SSLSocket) -> None:
    try:
        client.sendall(_PAGE)
    except (OSError, ssl.SSLError):
        pass


def _shut(connection: socket.socket) -> None:
    try:
        # Of the socket below TLS: the other thread must see it too.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        pass
