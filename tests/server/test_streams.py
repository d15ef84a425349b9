"""How answers are streamed: coalesced, alive while nothing happens, and bounded."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from sandkeep.errors import SessionStopped
from sandkeep.server import output
from sandkeep.server.routes import commands
from sandkeep.shared.outputlog import STDERR, STDOUT, Chunk, End, Gap, Item
from sandkeep.store.rows import Process, ProcessStatus
from sandkeep.wire import frames
from tests.server.conftest import Box


async def each(*pieces: bytes) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece


async def items(*found: Item) -> AsyncIterator[Item]:
    for item in found:
        yield item


async def collect(pieces: AsyncGenerator[bytes, None]) -> list[bytes]:
    return [piece async for piece in pieces]


def test_what_is_ready_goes_out_in_one_piece() -> None:
    async def run() -> None:
        lines = [b"%d\n" % number for number in range(1000)]
        assert await collect(output.batched(each(*lines))) == [b"".join(lines)]
        assert await collect(output.batched(each())) == []

    asyncio.run(run())


def test_nothing_is_made_while_enough_is_waiting_to_be_sent() -> None:
    made = 0

    async def endless() -> AsyncGenerator[bytes, None]:
        nonlocal made
        while True:
            made += 1
            yield b"x" * 1024

    async def run() -> None:
        pieces = output.batched(endless())
        await anext(pieces)
        for _ in range(20):
            await asyncio.sleep(0)
        assert made * 1024 <= 3 * output.FULL
        await pieces.aclose()

    asyncio.run(run())


def test_a_quiet_stream_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "HEARTBEAT_SECONDS", 0.02)

    async def quiet(long_enough: asyncio.Event) -> AsyncGenerator[bytes, None]:
        yield b"a\n"
        await long_enough.wait()
        yield b"b\n"

    async def run() -> None:
        found: list[bytes] = []
        long_enough = asyncio.Event()
        async for piece in output.batched(quiet(long_enough)):
            found.append(piece)
            if len(found) == 5:
                long_enough.set()
        assert found[0] == b"a\n" and len(found) > 4
        assert b"".join(found).replace(b"\n", b"") == b"ab" and b"".join(found).endswith(b"b\n")
        long_enough = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, long_enough.set)
        assert await collect(output.batched(quiet(long_enough), heartbeat=b"")) == [b"a\n", b"b\n"]

    asyncio.run(run())


def test_a_failure_in_the_middle_is_the_last_record() -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"first\n"
        raise SessionStopped("session x has stopped", session="x")

    async def run() -> None:
        found = b"".join(await collect(output.batched(output.guarded(broken(), print)))).splitlines()
        assert json.loads(found[1]) == {
            "stream": "error",
            "data": {"code": "sandbox_stopped", "message": "session x has stopped"},
        }

    asyncio.run(run())


def test_a_failure_nobody_foresaw_is_logged_and_told_without_its_cause() -> None:
    logged: list[str] = []

    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"first\n"
        raise RuntimeError("secret")

    def log(message: str, **facts: object) -> None:
        logged.append(f"{message}: {facts['error']}")

    async def run() -> None:
        found = b"".join(await collect(output.guarded(broken(), log)))
        assert b"sandbox_stream_closed" in found and b"secret" not in found
        assert logged == ["stream failed: secret"]

    asyncio.run(run())


def test_a_gap_is_told_in_every_form() -> None:
    log = (Chunk(0, 1, STDOUT, b"a"), Gap(1, 500), Chunk(501, 2, STDERR, b"b"), End(502, 3))

    async def run() -> None:
        text = [json.loads(line) for line in await collect(output.text_records(items(*log)))]
        assert "500 bytes of output were dropped" in text[1]["data"]
        exact = [json.loads(line) for line in await collect(output.byte_records(items(*log)))]
        assert exact[1] == {"offset": 1, "gap": 500}
        assert base64.b64decode(exact[2]["data"]) == b"b" and exact[3]["end"]
        framed = b"".join(await collect(output.byte_frames(items(*log))))
        assert frames.HEADER.unpack_from(framed, frames.HEADER.size + 1)[:2] == (8, frames.GAP)

    asyncio.run(run())


def test_a_long_wait_is_white_space_before_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "HEARTBEAT_SECONDS", 0.01)
    process = Process(
        id="cmd_1",
        session="sbx_1",
        project="p",
        name="x",
        cwd="/",
        started_ms=1,
        status=ProcessStatus.EXITED,
        exit_code=3,
    )

    async def run() -> None:
        waiting: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        found: list[bytes] = []
        async for piece in commands._trickle(waiting):
            found.append(piece)
            if len(found) == 4:
                waiting.set_result(process)
        assert len(found) > 3 and set(found[:-1]) == {b" "}
        assert json.loads(b"".join(found))["command"]["exitCode"] == 3

    asyncio.run(run())


@pytest.mark.slow
def test_input_that_nobody_reads_is_reported_after_half_a_minute(box: Box) -> None:
    command = box.start("sleep", "60", attachStdin=True)
    data = base64.b64encode(b"x" * (512 << 10)).decode()
    answer = box.api.post(f"{box.path}/cmd/{command['id']}/stdin", json={"data": data, "offset": 0})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "stdin_stalled"
    assert answer.json()["error"]["bytesWritten"] == 0


@pytest.mark.slow
def test_a_run_waited_for_longer_than_patience_still_ends_in_one_object(box: Box) -> None:
    command = box.start("sh", "-c", "read line; exit 4", attachStdin=True)
    path = f"{box.path}/cmd/{command['id']}"
    with box.api.stream("GET", path, params={"wait": "true"}) as answer:
        assert answer.headers["content-type"] == "application/json"
        pieces = answer.iter_raw()
        text = next(pieces)
        assert text == b" "
        box.api.post(f"{path}/stdin", json={"data": base64.b64encode(b"\n").decode(), "offset": 0})
        text += b"".join(pieces)
    assert json.loads(text)["command"]["exitCode"] == 4
