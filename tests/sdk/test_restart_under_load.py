"""A server that is restarted under load, by each way there is: what can go on goes on, the rest says why."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import sandkeep
from sandkeep import sync
from sandkeep.errors import TransportError
from tests.polling import ENOUGH, until
from tests.sdk.outages import restart
from tests.sdk.tls import Authority, TlsFront
from tests.server.server_process import ServerProcess

PRINTS = "for i in 1 2 3 4 5 6; do echo $i; sleep 0.05; done"
PRINTED = b"1\n2\n3\n4\n5\n6\n"
CONTENT = hashlib.sha256(b"x").digest() * (1 << 14)


class Load:
    """What clients do again and again until they are told to stop, and how it failed how often."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        """What should have gone on, and errors that do not say what to do."""
        self.told: Counter[str] = Counter()
        """Of what cannot be sent twice: errors that do."""
        self._threads: dict[str, threading.Thread] = {}
        self._over = threading.Event()
        self._guard = threading.Lock()

    def go_on_with(self, name: str, step: Callable[[], object], *, repeatable: bool = True) -> None:
        """In a thread of its own; what is not ``repeatable`` may fail, when the error says what to do."""
        thread = self._threads[name] = threading.Thread(target=self._loop, args=(name, step, repeatable))
        thread.start()

    def _loop(self, name: str, step: Callable[[], object], repeatable: bool) -> None:
        while not self._over.is_set():
            try:
                step()
            except BaseException as error:
                with self._guard:
                    if repeatable or not isinstance(error, TransportError) or not error.hint:
                        self.failed[f"{name}: {error!r}"] += 1
                    else:
                        self.told[f"{name}: {type(error).__name__}"] += 1
            with self._guard:
                self.done[name] += 1

    def await_all(self) -> None:
        """Until everybody has finished something, and is at work on something else."""
        with self._guard:
            before = Counter(self.done)
        until(lambda: all(self.done[name] > before[name] for name in self._threads))

    def close(self) -> None:
        """Let everybody finish what is under way."""
        self._over.set()
        for thread in self._threads.values():
            thread.join()


@contextmanager
def ways(
    server: ServerProcess, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, dict[str, Any]]]:
    """What to make clients with, by the way they take to the server."""
    authority = Authority(directory, "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with TlsFront(authority.server_context(), server.url, gateway=True) as front:
        yield {
            "unix": {"url": f"unix://{server.socket}", "team": server.team, "project": server.project},
            "tcp": {"url": server.url, "token": server.token},
            "tls": {"url": front.url, "token": server.token},
        }


class Work:
    """What one client does, in a sandbox that is there all the time."""

    def __init__(self, client: sync.Client, box: sync.Sandbox, directory: Path) -> None:
        self._client, self._box, self._directory = client, box, directory
        directory.mkdir()
        (directory / "up").write_bytes(CONTENT)

    def run(self) -> None:
        done = self._box.run_process("sh", ["-c", PRINTS], capture_output=True)
        assert (done.returncode, done.stdout) == (0, PRINTED), done

    def stream(self) -> None:
        process = self._box.create_process("sh", ["-c", PRINTS])
        data = b"".join(item.data for item in process.output() if isinstance(item, sandkeep.OutputChunk))
        assert (data, process.wait()) == (PRINTED, 0)

    def converse(self) -> None:
        with self._box.create_process("cat", stdin=True) as process:
            assert process.stdin is not None
            for line in (b"a\n", b"b\n"):
                process.stdin.write(line)
                assert process.stdout.readline() == line
            assert process.communicate(b"") == (b"a\nb\n", b"")

    def transfer(self) -> None:
        fs = self._box.fs
        fs.upload(self._directory / "up", "there")
        fs.download("there", self._directory / "down")
        assert (self._directory / "down").read_bytes() == CONTENT
        fs.write_bytes("again", CONTENT)
        with fs.open("again", "rb") as file:
            assert file.read() == CONTENT

    def scope(self) -> None:
        with self._client.create_sandbox() as box:
            box.fs.write_text("f", box.name)
            assert box.run_process("cat", ["f"], capture_output=True).stdout_text == box.name

    def change(self) -> None:
        """What cannot be sent twice."""
        fs = self._box.fs
        fs.write_text("old", "")
        fs.rename("old", "new")
        with fs.open("log", "ab") as file:
            file.write(b"x")
        self._box.extend_execution_time_limit(1)


class AsyncWork:
    """The same for asyncio, with a loop that a client keeps."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._runner = asyncio.Runner()
        self._client = sandkeep.Client(**options)
        self._runner.run(self._client.query_sandboxes().page())

    def scope(self) -> None:
        self._runner.run(self._scope())

    async def _scope(self) -> None:
        async with self._client.create_sandbox() as box:
            done = await box.run_process("sh", ["-c", PRINTS], capture_output=True)
            assert (done.returncode, done.stdout) == (0, PRINTED), done

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()


@pytest.mark.slow
def test_a_restart_under_load_fails_nothing_that_can_go_on(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandkeep.sdk.retry.OUTAGE_SECONDS", ENOUGH)
    with ExitStack() as held, closing(Load()) as load:
        first = held.enter_context(sync.Client(server.url, token=server.token))
        before = {info.name for info in first.query_sandboxes()}
        boxes = []
        for way, options in held.enter_context(ways(server, tmp_path, monkeypatch)).items():
            client = held.enter_context(sync.Client(**options))
            box = held.enter_context(client.create_sandbox())
            boxes.append(box)
            work = Work(client, box, tmp_path / way)
            for job in (work.run, work.stream, work.converse, work.transfer, work.scope):
                load.go_on_with(f"{way} {job.__name__}", job)
            load.go_on_with(f"{way} change", work.change, repeatable=False)
            other = held.enter_context(closing(AsyncWork(options)))
            load.go_on_with(f"{way} async scope", other.scope)
        load.await_all()
        restart(server, signal.SIGTERM)
        load.await_all()
        restart(server, signal.SIGKILL)
        load.close()
        assert not load.failed, (load.done, load.failed, load.told)
        for box in boxes:
            ended = box.processes()
            assert ended and all(process.returncode == 0 for process in ended)
        held.pop_all().close()
    with sync.Client(server.url, token=server.token) as last:
        assert {info.name for info in last.query_sandboxes()} == before
