"""Supervisors of other versions: spoken to where that is possible, and refused alone where it is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandkeep.errors import HostCannot
from sandkeep.host.driver import ProcessSpec, SessionRef
from sandkeep.host.native.driver import NativeDriver
from sandkeep.shared import protocol

PEER = Path(__file__).with_name("frozen_supervisor.py")
REF = SessionRef("local", "sbx_frozen")


@contextmanager
def frozen(data: Path, newest: int, oldest: int, *options: str) -> Iterator[tuple[NativeDriver, Path]]:
    """A driver, and the directory of a session whose supervisor is the frozen one."""
    directory = data / "sessions" / REF.session
    directory.mkdir(parents=True)
    command = [sys.executable, "-I", str(PEER), str(directory), str(newest), str(oldest), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as peer:
        try:
            assert peer.stdout is not None and peer.stdout.readline() == b"ready\n"
            yield NativeDriver(str(data)), directory
        finally:
            peer.kill()


def received(directory: Path) -> list[str]:
    path = directory / "received"
    return path.read_text().split() if path.exists() else []


async def _pieces() -> AsyncIterator[bytes]:
    yield b"content"


def test_what_an_earlier_supervisor_cannot_do_is_refused_before_it_is_sent(
    tmp_path: Path,
) -> None:
    with frozen(tmp_path, 2, 1) as (driver, directory):

        async def talk() -> None:
            await driver.start_process(REF, ProcessSpec("p", ("true", *["x" * 100_000] * 20)))
            with pytest.raises(HostCannot, match="earlier version"):
                await driver.start_process(REF, ProcessSpec("q", ("true", *["\x01" * 100_000] * 20)))
            with pytest.raises(HostCannot, match="standard error"):
                await driver.start_process(REF, ProcessSpec("r", ("true",), stderr="stdout"))
            with pytest.raises(HostCannot, match="grace"):
                await driver.start_process(REF, ProcessSpec("r", ("true",), kill_after_ms=9, grace_ms=9))
            with pytest.raises(HostCannot, match="grace"):
                await driver.signal(REF, 15, "p", grace_ms=9)
            with pytest.raises(HostCannot, match="removal"):
                await driver.start_process(REF, ProcessSpec("r", ("true",), env={"A": None}))
            await driver.close()

        asyncio.run(talk())
        assert received(directory).count("process.start") == 1


def test_a_supervisor_that_records_neither_input_nor_metadata_is_asked_for_neither(tmp_path: Path) -> None:
    with frozen(tmp_path, protocol.RECORDS_INPUT - 1, 1) as (driver, directory):

        async def talk() -> None:
            await driver.start_process(REF, ProcessSpec("p", ("true",), stdin=True, stderr="stdout"))
            with pytest.raises(HostCannot, match="how much input"):
                await driver.input(REF, "p")
            with pytest.raises(HostCannot, match="metadata"):
                await driver.start_process(REF, ProcessSpec("q", ("true",), metadata={"a": "b"}))
            await driver.close()

        asyncio.run(talk())
        assert received(directory) == ["process.start"]


def test_a_supervisor_of_the_oldest_protocol_is_spoken_to(tmp_path: Path) -> None:
    assert protocol.OLDEST == 1, "the peer speaks 1: freeze a supervisor of the oldest protocol"
    with frozen(tmp_path, protocol.OLDEST, protocol.OLDEST) as (driver, directory):

        async def talk() -> None:
            assert (await driver.state(REF)).status == "running"
            process = await driver.start_process(REF, ProcessSpec("p", ("true",)))
            assert process.record.exit_code == 7
            assert (await driver.wait_process(REF, "p")).exit_code == 7
            assert await driver.set_deadline(REF, 123_456, timeout_ms=5) == 123_456
            # It takes no content from sockets, so it is not asked to.
            files = driver.files(REF)
            assert await files.open_write("/f") is None
            assert await files.write("/f", _pieces()) == 7
            download = await files.open_read("/f")
            assert b"".join([chunk async for chunk in download.pieces()]) == b"content"
            await download.aclose()
            stopped = await driver.stop(REF, reason="test")
            assert stopped.status == "stopped"
            await driver.close()

        asyncio.run(talk())
        assert "hello" not in received(directory), "the record says it without a round trip"


@pytest.mark.parametrize(
    ("newest", "oldest"),
    [(protocol.OLDEST - 1, protocol.OLDEST - 1), (protocol.PROTOCOL + 5, protocol.PROTOCOL + 1)],
    ids=["too old", "too new"],
)
@pytest.mark.parametrize("record", [(), ("no-record",)], ids=["record", "no record"])
def test_a_supervisor_of_another_protocol_is_refused_by_name_and_killed_on_stop(
    tmp_path: Path, newest: int, oldest: int, record: tuple[str, ...]
) -> None:
    with frozen(tmp_path, newest, oldest, *record) as (driver, directory):

        async def talk() -> None:
            requests: list[Awaitable[object]] = [
                driver.state(REF),
                driver.start_process(REF, ProcessSpec("p", ("true",))),
                driver.files(REF).stat("/"),
                driver.files(REF).open_write("/f"),
                driver.listeners(REF),
            ]
            for work in requests:
                with pytest.raises(HostCannot, match="protocol") as refused:
                    await work
                assert refused.value.details["session"] == REF.session and refused.value.hint
            assert set(received(directory)) <= {"hello"}, "nothing else is sent to it"
            waiting = asyncio.create_task(driver.wait_stopped(REF))
            stopped = await driver.stop(REF, reason="test")
            assert stopped.status == "aborted"
            assert (await asyncio.wait_for(waiting, 30)).status == "aborted"
            assert not driver.alive(REF.session)
            await driver.close()

        asyncio.run(talk())
        assert set(received(directory)) <= {"hello"}
        assert os.path.exists(directory / "state.json")


def test_a_newer_supervisor_that_still_speaks_this_protocol_is_spoken_to(tmp_path: Path) -> None:
    newest, oldest = protocol.PROTOCOL + 1, protocol.PROTOCOL
    with frozen(tmp_path, newest, oldest) as (driver, _):

        async def talk() -> None:
            assert (await driver.state(REF)).status == "running"
            await driver.close()

        asyncio.run(talk())
