"""Logs of processes that are damaged, torn or gone: said at once, with everything that is intact."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandkeep import sync
from sandkeep.errors import NotFound, OutputDamaged
from sandkeep.sdk import retry
from tests.cli.program import Program
from tests.server.server_process import PROJECT, TEAM, ServerProcess


@pytest.fixture(params=["unix", "tcp"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[sync.Client]:
    if request.param == "unix":
        made = sync.Client(f"unix://{server.socket}", team=TEAM, project=PROJECT)
    else:
        made = sync.Client(server.url, token=server.token)
    with made:
        yield made


@pytest.fixture(autouse=True)
def no_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with a log is known at the first try; only a connection is worth another."""

    def refuse(self: retry.Reconnecting, failure: Exception) -> float:
        raise AssertionError("the log was asked for again") from failure

    monkeypatch.setattr(retry.Reconnecting, "after", refuse)


class Printed:
    """A process that has printed three lines, and where the server keeps that."""

    def __init__(self, server: ServerProcess, client: sync.Client, name: str, *, more: str = "") -> None:
        self.box = client.create_sandbox(name)
        script = f"echo one; sleep 0.3; echo two; sleep 0.3; echo three{more}"
        self.process = self.box.create_process("sh", ["-c", script])
        self.session = server.data / "sessions" / self.process.session_id
        self.directory = self.session / "processes" / self.process.id

    @property
    def log(self) -> Path:
        return next(self.directory.glob("*.log"))

    def damage(self, at: bytes, shift: int = 0) -> None:
        """Change one byte, counted from where some text is."""
        content = bytearray(self.log.read_bytes())
        content[content.index(at) + shift] ^= 0x20
        self.log.write_bytes(content)


@contextmanager
def printed(server: ServerProcess, client: sync.Client, name: str, *, more: str = "") -> Iterator[Printed]:
    made = Printed(server, client, name, more=more)
    try:
        yield made
    finally:
        made.box.destroy()


def _seen(process: sync.Process, *, follow: bool = True) -> list[bytes | tuple[int, int, str]]:
    """Data, and gaps by their facts."""
    return [
        item.data if isinstance(item, sync.OutputChunk) else (item.offset, item.length, item.reason)
        for item in process.output(follow=follow)
    ]


@pytest.mark.parametrize("shift", [0, -20], ids=["bytes", "header"])
def test_damage_in_the_middle_is_a_gap_and_the_rest_is_served(
    server: ServerProcess, client: sync.Client, name: str, shift: int
) -> None:
    with printed(server, client, name) as made:
        assert made.process.wait() == 0
        made.damage(b"two\n", shift)
        expected = [b"one\n", (4, 4, "damaged"), b"three\n"]
        assert _seen(made.process) == expected
        assert _seen(made.process, follow=False) == expected
        with pytest.raises(OutputDamaged) as caught:
            made.process.stdout.read()
        assert (caught.value.process, caught.value.offset, caught.value.length) == (made.process.id, 4, 4)
        with pytest.raises(OutputDamaged):
            made.process.communicate()
        here = Program({"SANDKEEP_URL": server.url, "SANDKEEP_TOKEN": server.token})
        shown = here("logs", name, made.process.id)
        assert shown.out == b"one\nthree\n" and "4 bytes of output cannot be shown" in shown.err
        with server.client() as api:
            path = f"/v2/sandboxes/sessions/{made.process.session_id}/cmd/{made.process.id}/logs"
            records = [json.loads(line) for line in api.get(path).text.splitlines()]
        assert [each["data"] for each in records if each["stream"] == "stdout"] == ["one\n", "three\n"]
        assert any("damaged from byte 4" in each["data"] for each in records)


def test_a_damaged_end_is_told_also_while_the_session_runs(
    server: ServerProcess, client: sync.Client, name: str
) -> None:
    with printed(server, client, name, more="; sleep 600") as made:
        items = made.process.output()
        for _ in range(3):
            next(items)
        items.close()
        made.damage(b"three\n", -20)
        assert _seen(made.process, follow=False) == [b"one\n", b"two\n", (8, 6, "damaged")]
        made.box.stop()
        assert _seen(made.process)[:2] == [b"one\n", b"two\n"]
        assert (8, 6, "damaged") in _seen(made.process), (
            "its end is intact, so it is known how much is missing"
        )


def test_the_log_of_a_process_whose_supervisor_died_ends_where_it_was_cut_off(
    server: ServerProcess, client: sync.Client, name: str
) -> None:
    with printed(server, client, name, more="; sleep 600") as made:
        items = made.process.output()
        for _ in range(3):
            next(items)
        state = json.loads((made.session / "state.json").read_text())
        os.kill(state["supervisor_pid"], signal.SIGKILL)
        assert list(items) == [], "it ends, and is not asked for again"
        made.process.wait()
        assert made.process.status is sync.ProcessStatus.LOST
        assert _seen(made.process) == [b"one\n", b"two\n", b"three\n"]
        assert made.process.stdout.read() == b"one\ntwo\nthree\n"
        os.truncate(made.log, made.log.stat().st_size - 2)
        assert _seen(made.process) == [b"one\n", b"two\n", b"thre", (12, 2, "damaged")]


def test_a_log_that_is_gone_is_not_found(server: ServerProcess, client: sync.Client, name: str) -> None:
    with printed(server, client, name) as made:
        made.process.wait()
        made.box.stop()
        shutil.rmtree(made.directory)
        with pytest.raises(NotFound, match="output"):
            list(made.process.output())


def test_a_damaged_record_of_a_process_does_not_hide_its_output(
    server: ServerProcess, client: sync.Client, name: str
) -> None:
    with printed(server, client, name) as made:
        made.process.wait()
        made.box.stop()
        (made.directory / "record.jsonl").write_bytes(b"\xff\x00 nonsense\n")
        assert made.box.get_process(made.process.id).returncode == 0, "the store remembers"
        assert _seen(made.process) == [b"one\n", b"two\n", b"three\n"]
