"""A server that goes away and comes back: what was under way goes on, whichever way the client reaches it."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sandkeep
from sandkeep import sync
from sandkeep.errors import NotFound, PathExists, ProcessTimeout, ServerUnreachable, TransportError
from tests.polling import ENOUGH, until
from tests.sdk.outages import Guide, Losing, await_file, meanwhile, restart
from tests.sdk.scripted_server import Scripted, json_answer
from tests.sdk.tls import Authority, TlsFront
from tests.server.server_process import ServerProcess

pytestmark = pytest.mark.anyio

EMPTY_PAGE = json_answer({"sandboxes": [], "pagination": {"count": 0, "next": None}})
HOW = [signal.SIGTERM, signal.SIGKILL]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a server may take longer on a busy machine than on any other."""
    monkeypatch.setattr("sandkeep.sdk.retry.OUTAGE_SECONDS", ENOUGH)


@pytest.fixture(params=["unix", "tcp", "tls"])
def client(
    request: pytest.FixtureRequest, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[sandkeep.Client]:
    """A client in the tests' project, by each way there is."""
    if request.param == "unix":
        yield sandkeep.Client(f"unix://{server.socket}", team=server.team, project=server.project)
    elif request.param == "tcp":
        yield sandkeep.Client(server.url, token=server.token)
    else:
        authority = Authority(tmp_path, "authority")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        with TlsFront(authority.server_context(), server.url) as front:
            yield sandkeep.Client(front.url, token=server.token)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
async def test_a_run_under_way_goes_on(
    client: sandkeep.Client, server: ServerProcess, name: str, how: int
) -> None:
    async with client, client.create_sandbox(name) as box:
        with meanwhile(Guide(server, name, how)):
            done = await box.run_process("sh", ["-c", Guide.SCRIPT], capture_output=True)
        assert (done.returncode, done.stdout) == (3, Guide.PRINTED)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
async def test_a_run_with_a_limit_goes_on(
    client: sandkeep.Client, server: ServerProcess, name: str, how: int
) -> None:
    async with client, client.create_sandbox(name) as box:
        with meanwhile(Guide(server, name, how)):
            done = await box.run_process("sh", ["-c", Guide.SCRIPT], capture_output=True, timeout=ENOUGH)
        assert (done.returncode, done.stdout) == (3, Guide.PRINTED)


class Restarting:
    """A target that takes the server away with the first it gets, and lets the process go on with it."""

    def __init__(self, server: ServerProcess, name: str) -> None:
        self.got = b""
        self._server, self._name = server, name

    def write(self, data: bytes) -> int:
        self.got += data[:3]
        if self.got.endswith(b"ore"):
            restart(self._server, signal.SIGKILL, down=0.1)
            with sync.Client(self._server.url, token=self._server.token) as client:
                client.get_sandbox(self._name).fs.write_text("go", "")
        return min(len(data), 3)


@pytest.mark.parametrize("limit", [None, ENOUGH])
async def test_output_on_its_way_elsewhere_comes_whole_and_once(
    server: ServerProcess, name: str, limit: float | None
) -> None:
    async with sandkeep.Client(server.url, token=server.token) as client, client.create_sandbox(name) as box:
        target = Restarting(server, name)
        done = await box.run_process("sh", ["-c", Guide.SCRIPT], stdout=target, timeout=limit)
        assert (done.returncode, target.got) == (3, Guide.PRINTED)


async def test_what_a_process_prints_and_reads_goes_on(
    client: sandkeep.Client, server: ServerProcess, name: str
) -> None:
    async with (
        client,
        client.create_sandbox(name) as box,
        await box.create_process("cat", stdin=True) as process,
    ):
        assert process.stdin is not None
        await process.stdin.write("before\n")
        assert await process.stdout.readline() == b"before\n"
        restart(server, signal.SIGKILL)
        await process.stdin.write("after\n")
        assert await process.stdout.readline() == b"after\n"
        assert await process.communicate(b"") == (b"before\nafter\n", b"")
        assert await process.wait() == 0


async def test_files_being_read_and_written_go_on(
    client: sandkeep.Client, server: ServerProcess, tmp_path: Path
) -> None:
    content = bytes(range(256)) * (9 << 12)  # more than is under way at once
    async with client, client.create_sandbox() as box:
        async with box.fs.open("big", "wb") as writer:
            await writer.write(content[: 5 << 20])
            restart(server, signal.SIGTERM)
            await writer.write(content[5 << 20 :])
        async with box.fs.open("big", "rb") as reader:
            first = await reader.read(1000)
            restart(server, signal.SIGKILL)
            assert first + await reader.read() == content
        await box.fs.write_bytes("big", content * 6)  # more than fits into all buffers on the way
        async with box.fs.open("big", "rb") as reader:
            await reader.read(1000)
            await box.fs.write_bytes("big", content[::-1])
            restart(server, signal.SIGKILL)
            with pytest.raises(TransportError) as changed:
                await reader.read()
            assert "changed" in changed.value.message and changed.value.hint


async def test_transfers_under_way_begin_again(
    client: sandkeep.Client, server: ServerProcess, tmp_path: Path
) -> None:
    content = hashlib.sha256(b"x").digest() * (1 << 20)
    (tmp_path / "up").write_bytes(content)
    stops: list[int] = []

    def interrupt(seen: sandkeep.Transferred) -> None:
        if stops and seen.bytes > 1 << 20:
            restart(server, stops.pop())

    async with client, client.create_sandbox() as box:
        stops.append(signal.SIGKILL)
        await box.fs.upload(tmp_path / "up", "there", progress=interrupt)
        assert not stops
        stops.append(signal.SIGKILL)
        await box.fs.download("there", tmp_path / "down", progress=interrupt)
        assert not stops
        assert (tmp_path / "down").read_bytes() == content


async def test_terminals_are_opened_once_the_server_is_back_and_say_that_it_went(
    client: sandkeep.Client, server: ServerProcess
) -> None:
    async with client, client.create_sandbox() as box:
        server.stop()
        with meanwhile(server.start):
            async with box.open_interactive("sh", ["-c", "echo opened; exit 4"]) as terminal:
                assert await terminal.wait() == 4
        async with box.open_interactive("cat") as terminal:
            restart(server, signal.SIGKILL)
            with pytest.raises(TransportError) as ended:
                while True:
                    await terminal.read()
            assert ended.value.hint
            with pytest.raises(TransportError):
                while True:
                    await terminal.write(b"x" * 100_000)


@pytest.mark.slow
async def test_a_loop_of_ordinary_calls_does_not_notice(
    client: sandkeep.Client, server: ServerProcess
) -> None:
    stopped = False

    def restarts() -> None:
        nonlocal stopped
        for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            time.sleep(1)
            restart(server, how, down=1.5)
        stopped = True

    made = []
    async with client:
        await client.query_sandboxes().page()
        with meanwhile(restarts):
            while not stopped:
                async with client.create_sandbox() as box:
                    made.append(box.name)
                    await box.fs.write_text("f", box.name)
                    done = await box.run_process("cat", ["f"], capture_output=True, check=True)
                    assert done.stdout_text == box.name
                    assert [entry.name for entry in await box.fs.listdir(".")] == ["f"]
                    await box.stop()
                    assert await box.fs.read_text("f") == box.name
        assert made
        left = {info.name async for info in client.query_sandboxes()}
        assert not left.intersection(made)


async def test_a_limit_of_the_caller_holds_while_the_server_is_away(
    client: sandkeep.Client, server: ServerProcess
) -> None:
    async with client, client.create_sandbox() as box:
        process = await box.create_process("sleep", ["60"])
        server.stop()
        try:
            with pytest.raises(ProcessTimeout):
                await process.wait(timeout=1)
        finally:
            server.start()
        with pytest.raises(ProcessTimeout):
            await process.wait(timeout=0.1)
        await process.kill()


# --- answers that are lost -----------------------------------------------------------------------------


async def test_what_was_done_before_its_answer_was_lost_is_not_done_again(
    server: ServerProcess, name: str
) -> None:
    with Losing(server.url) as way:
        async with sandkeep.Client(way.url, token=server.token) as client:
            way.lose("POST /v3/sandboxes")
            box = await client.create_sandbox(name)
            assert box.name == name
            way.lose("POST /v3/sandboxes")
            async with client.create_sandbox() as unnamed:
                assert unnamed.status is sandkeep.SessionStatus.RUNNING
            way.lose("POST /v2/sandboxes/sessions/")
            done = await box.run_process("sh", ["-c", "echo x >> runs; cat runs"], capture_output=True)
            assert done.stdout == b"x\n"
            way.lose("POST /v2/sandboxes/sessions/")
            process = await box.create_process("sh", ["-c", "echo y >> runs"])
            assert await process.wait() == 0
            assert await box.fs.read_text("runs") == "x\ny\n"
            assert len(await box.processes()) == 2
            way.lose("POST /v1/sessions/")
            checkpoint = await box.checkpoint()
            assert [found.id async for found in box.snapshots()] == [checkpoint.id]
            way.lose("POST /v2/sandboxes/sessions/")
            taken = await box.snapshot()
            assert {found.id async for found in box.snapshots()} == {checkpoint.id, taken.id}
            way.lose(f"POST /v2/sandboxes/{name}/fork")
            async with client.fork_sandbox(name, f"{name}-fork") as fork:
                assert await fork.fs.read_text("runs") == "x\ny\n"
            way.lose(f"DELETE /v2/sandboxes/{name}")
            await box.destroy()
            assert way.lost == 8


async def test_files_are_written_made_and_removed_although_the_answer_was_lost(server: ServerProcess) -> None:
    with Losing(server.url) as way:
        async with sandkeep.Client(way.url, token=server.token) as client, client.create_sandbox() as box:
            way.lose("PUT /v1/sessions/")
            await box.fs.write_text("f", "content")
            assert await box.fs.read_text("f") == "content"
            way.lose("POST /v1/sessions/")
            await box.fs.mkdir("d")
            assert await box.fs.is_dir("d")
            way.lose("POST /v1/sessions/")
            await box.fs.remove("d")
            assert not await box.fs.exists("d")
            way.lose("POST /v1/sessions/")
            with pytest.raises(PathExists):
                await box.fs.mkdir("f")
            way.lose("POST /v1/sessions/")
            with pytest.raises(TransportError) as unclear:
                await box.fs.rename("f", "g")
            assert "may or may not have been carried out" in str(unclear.value)
            assert await box.fs.exists("g")
            assert way.lost == 5


async def test_a_name_given_to_another_sandbox_since_is_not_destroyed_instead(
    server: ServerProcess, name: str
) -> None:
    with Losing(server.url) as way:
        async with (
            sandkeep.Client(way.url, token=server.token) as client,
            sandkeep.Client(server.url, token=server.token) as other,
        ):
            box = await client.create_sandbox(name)
            await (await other.get_sandbox(name)).destroy()
            async with other.create_sandbox(name):
                # What a repeated request says; the first one, by name alone, was lost with its sandbox.
                path = f"/v2/sandboxes/{name}"
                with pytest.raises(NotFound):
                    await client._transport.request("DELETE", path, query={"session": box.current_session.id})
                assert (await other.get_sandbox(name)).name == name


# --- servers that stay away ----------------------------------------------------------------------------


async def test_a_server_that_was_there_is_waited_for_and_then_told_of() -> None:
    server = Scripted(EMPTY_PAGE)
    async with sandkeep.Client(server.url, timeout=1.5) as client:
        with server:
            await client.query_sandboxes().page()
        with pytest.raises(ServerUnreachable) as away:
            await client.create_sandbox("a")
        assert away.value.tries > 2 and 0.5 < away.value.seconds < ENOUGH
        assert f"tried {away.value.tries} times" in away.value.message
        assert away.value.hint and away.value.url == server.url


async def test_a_server_that_never_was_is_told_of_at_once() -> None:
    for url in ("http://127.0.0.1:1", "unix:///nonexistent/server.sock"):
        async with sandkeep.Client(url) as client:
            with pytest.raises(ServerUnreachable) as missing:
                await client.create_sandbox("a")
            assert "tried" not in missing.value.message


async def test_a_scope_whose_server_stays_away_says_what_it_left(server: ServerProcess, name: str) -> None:
    async with sandkeep.Client(server.url, token=server.token) as other:
        for destroy, command in ((True, "rm"), (False, "stop")):
            to_do = f"sandkeep {command} {name}"
            way = Losing(server.url)
            async with sandkeep.Client(way.url, token=server.token, timeout=0.5) as client:
                with way:
                    scope = client.create_sandbox(name, destroy=destroy)
                    box = await scope.__aenter__()
                with pytest.raises(ServerUnreachable) as left:
                    await scope.__aexit__(None, None, None)
                assert left.value.sandbox == name and to_do in str(left.value)
                mistake = ZeroDivisionError()
                await box.__aexit__(ZeroDivisionError, mistake, None)
                assert to_do in "".join(mistake.__notes__)
                with pytest.warns(RuntimeWarning, match=to_do):
                    await box.__aexit__(KeyboardInterrupt, KeyboardInterrupt(), None)
            await (await other.get_sandbox(name)).destroy()


async def test_what_may_have_been_done_is_told_as_such_when_the_server_stays_away(
    server: ServerProcess, name: str
) -> None:
    with Losing(server.url) as way:
        async with sandkeep.Client(way.url, token=server.token, timeout=0.5) as client:
            way.lose("POST /v3/sandboxes", leave=True)
            with pytest.raises(ServerUnreachable) as unclear:
                await client.create_sandbox(name)
            assert "may or may not have been carried out" in str(unclear.value) and unclear.value.tries > 1
            with pytest.raises(ServerUnreachable) as unread:
                await client.get_sandbox(name)
            assert "carried out" not in str(unread.value) and unread.value.hint
    async with sandkeep.Client(server.url, token=server.token) as other:
        await (await other.get_sandbox(name)).destroy()


async def test_a_scope_left_while_the_server_is_away_is_cleaned_up_once_it_is_back(
    server: ServerProcess, name: str
) -> None:
    async with sandkeep.Client(server.url, token=server.token) as client:
        scope = client.create_sandbox(name)
        await scope.__aenter__()
        server.stop(signal.SIGKILL)
        with meanwhile(server.start):
            await scope.__aexit__(None, None, None)
        with pytest.raises(NotFound):
            await client.get_sandbox(name)


async def test_a_process_is_not_killed_because_its_server_is_away(server: ServerProcess, name: str) -> None:
    other = sandkeep.Client(server.url, token=server.token)
    async with other, other.create_sandbox(name) as box:
        began = f"echo $$; touch began; exec sleep {ENOUGH}"
        way = Losing(server.url)
        async with sandkeep.Client(way.url, token=server.token, timeout=1) as client:
            with meanwhile(lambda: _open_until_begun(server, name, way)):
                handle = await client.get_sandbox(name)
                with pytest.raises(TransportError) as lost:
                    await handle.run_process("sh", ["-c", began])
        process = await box.get_process(lost.value.process)
        assert await process.poll() is None
        await process.kill()


def _open_until_begun(server: ServerProcess, name: str, way: Losing) -> None:
    with way:
        await_file(server, name, "began")
        until(lambda: not way.unanswered)  # the client knows which process it is
