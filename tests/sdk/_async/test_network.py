"""Secrets are set and never read; what a sandbox's network did is told, as it is and as it happens."""

from __future__ import annotations

import os
import socket
from contextlib import aclosing

import pytest

import sandkeep
from sandkeep.errors import InvalidRequest, NotFound

pytestmark = pytest.mark.anyio

DENIED = sandkeep.NetworkPolicy(mode=sandkeep.PolicyMode.DENY_ALL)
LOOK_UP = "import socket, sys\ntry: socket.getaddrinfo(sys.argv[1], 80)\nexcept OSError: pass"
CONNECT = "import socket\ntry: socket.create_connection(('192.0.2.1', 81), 5)\nexcept OSError: pass"


async def test_secrets_are_set_listed_and_deleted(name: str) -> None:
    pytest.importorskip("cryptography", reason="secrets need sandkeep[net]")
    async with sandkeep.Client() as client:
        made = await client.secrets.set(name, "value")
        changed = await client.secrets.set(name, "another")
        assert changed.created_at == made.created_at <= changed.updated_at
        assert changed in await client.secrets.list()
        assert "another" not in repr(changed)
        await client.secrets.delete(name)
        assert changed not in await client.secrets.list()
        with pytest.raises(NotFound):
            await client.secrets.delete(name)
        with pytest.raises(InvalidRequest):
            await client.secrets.set(name, "")


async def test_a_secret_is_a_variable_of_the_processes_that_name_it(name: str) -> None:
    pytest.importorskip("cryptography", reason="secrets need sandkeep[net]")
    value = "two\nlines"
    async with sandkeep.Client() as client, client.create_sandbox(name) as box:
        await client.secrets.set(name, value)
        secrets = {"API_KEY": name}
        ran = await box.run_process("printenv", ["API_KEY"], secrets=secrets, capture_output=True)
        assert ran.stdout == f"{value}\n".encode()
        started = await box.create_process("sh", ["-c", 'test -n "$API_KEY"'], secrets=secrets)
        assert await started.wait() == 0
        async with box.open_interactive("printenv", ["API_KEY"], secrets=secrets) as terminal:
            assert await terminal.wait() == 0
        assert (await box.run_process("printenv", ["API_KEY"])).returncode == 1
        with pytest.raises(NotFound) as absent:
            await box.run_process("true", secrets={"API_KEY": f"{name}-absent"})
        assert absent.value.details["field"] == 'secrets["API_KEY"]'
        with pytest.raises(InvalidRequest, match="also in env"):
            await box.run_process("true", secrets=secrets, env={"API_KEY": "x"})
        await client.secrets.delete(name)


async def test_a_port_of_the_host_is_given_and_taken_away(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        port = service.getsockname()[1]
        granted = [sandkeep.HostPort(port, "model.internal")]
        async with sandkeep.create_sandbox(name, network_policy=DENIED, host_ports=granted) as box:
            assert box.host_ports == tuple(granted)
            reach = ["-c", f"import socket; socket.create_connection(('model.internal', {port}), 30)"]
            assert (await box.run_process("python3", reach)).returncode == 0
            service.accept()[0].close()
            await box.update(host_ports=[])
            assert box.host_ports == ()
            assert (await box.run_process("python3", reach)).returncode != 0
            with pytest.raises(InvalidRequest, match=r"host_ports\[1\]"):
                await box.update(host_ports=granted * 2)


async def test_what_the_network_did_is_told_oldest_first_and_then_as_it_happens(name: str) -> None:
    async with sandkeep.create_sandbox(name, network_policy=DENIED) as box:
        assert [event async for event in box.network_events()] == []
        await box.run_process("python3", ["-c", LOOK_UP, "first.test"])
        await box.run_process("python3", ["-c", CONNECT])
        seen = []
        async with aclosing(box.network_events(follow=True)) as events:
            async for event in events:
                seen.append(event)
                if event.kind == "connection":
                    await box.run_process("python3", ["-c", LOOK_UP, "second.test"])
                if event.name == "second.test":
                    break
        dns = next(event for event in seen if event.name == "first.test")
        assert (dns.kind, dns.verdict, dns.session_id) == ("dns", "deny", box.current_session.id)
        assert dns.query_type in ("A", "AAAA") and dns.reason
        connection = next(event for event in seen if event.kind == "connection")
        assert (connection.address, connection.port) == ("192.0.2.1", 81)
        assert connection.verdict == "deny" and connection.method is None
        await box.stop()
        recorded = [event async for event in box.network_events()]
        assert recorded[: len(seen)] == seen
        assert box.status.is_final


async def test_what_happened_is_told_with_who_had_it_done_also_when_the_sandbox_is_gone(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        await box.run_process("true")
        told = [event async for event in box.events()]
        assert [event.kind for event in told] == ["sandbox.created", "session.started", "process.started"]
        assert {event.sandbox_name for event in told} == {name}
        assert {event.actor for event in told} == {f"user:{os.geteuid()}"}
        assert told[-1].session_id == box.current_session.id
        assert told[-1].data["command"] == "true"
        assert [event async for event in box.events(kind="process.")] == told[-1:]
        async with aclosing(box.events(kind="files.", follow=True)) as events:
            await box.fs.write_text("file", "text")
            async for event in events:
                assert event.data["path"].endswith("file")
                break
    async with sandkeep.Client() as client:
        mine = [event.kind async for event in client.events() if event.sandbox_name == name]
    assert mine[:3] == [event.kind for event in told]
    assert mine[-1] == "sandbox.destroyed"


async def test_a_sandbox_that_is_gone_has_no_events(name: str) -> None:
    box = await sandkeep.create_sandbox(name)
    await box.destroy()
    with pytest.raises(NotFound):
        async for _ in box.network_events(follow=True):
            pass
