"""Servers behind TLS: whoever the system or ``SSL_CERT_FILE`` trusts is believed, and nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

import sandkeep
from sandkeep.errors import ServerUnreachable, TransportError
from tests.sdk.tls import Authority, TlsFront
from tests.server.server_process import ServerProcess

pytestmark = pytest.mark.anyio


async def test_everything_goes_through_tls_with_an_authority_of_ones_own(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path, "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with TlsFront(authority.server_context(), server.url) as front:
        async with sandkeep.Client(front.url, token=server.token) as client, client.create_sandbox() as box:
            await box.fs.write_bytes("f", b"x" * 1_000_000)
            assert await box.fs.read_bytes("f") == b"x" * 1_000_000
            done = await box.run_process("sh", ["-c", "cat; exit 3"], input=b"in", capture_output=True)
            assert (done.returncode, done.stdout) == (3, b"in")
            async with box.open_interactive("sh", ["-c", "exit 4"]) as terminal:
                assert await terminal.wait() == 4


async def test_who_is_not_trusted_is_told_with_what_to_do(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, other = Authority(tmp_path, "authority"), Authority(tmp_path, "other")
    with TlsFront(authority.server_context(), server.url) as front:
        for trusted in (None, other):
            if trusted is not None:
                monkeypatch.setenv("SSL_CERT_FILE", str(trusted.file))
            async with sandkeep.Client(front.url, token=server.token) as client:
                with pytest.raises(ServerUnreachable) as refused:
                    await client.query_sandboxes().page()
            assert "certificate" in refused.value.message and refused.value.url == front.url
            assert "SSL_CERT_FILE" in (refused.value.hint or "")


async def test_a_server_without_tls_is_told_apart(server: ServerProcess) -> None:
    async with sandkeep.Client(server.url.replace("http:", "https:"), token=server.token) as client:
        with pytest.raises(TransportError) as refused:
            await client.query_sandboxes().page()
    assert refused.value.hint is None or "SSL_CERT_FILE" not in refused.value.hint
