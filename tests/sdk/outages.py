"""A server that is restarted under its clients, and answers that are lost on the way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sandkeep import sync
from tests.polling import until
from tests.server.server_process import ServerProcess

DOWN_SECONDS = 0.7


def restart(server: ServerProcess, how: int, *, down: float = DOWN_SECONDS) -> None:
    """End the server, leave it away for a while, start it again at the same place."""
    server.stop(how)
    time.sleep(down)
    server.start()


@contextmanager
def meanwhile(*steps: Callable[[], object]) -> Iterator[None]:
    """Do something in a thread, and see that it worked."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for step in steps:
                step()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not failures, failures


def await_file(server: ServerProcess, name: str, path: str) -> None:
    """Wait until a file is there, through a client of its own: what is tested must not help testing."""
    with sync.Client(server.url, token=server.token) as client:
        box = client.get_sandbox(name)
        until(lambda: box.fs.exists(path))


class Guide:
    """Leads a process of a sandbox through a restart: it prints, waits to be told, and prints again."""

    SCRIPT = "echo before; touch began; while [ ! -e go ]; do sleep 0.05; done; echo after; exit 3"
    PRINTED = b"before\nafter\n"

    def __init__(self, server: ServerProcess, name: str, how: int) -> None:
        self._server, self._name, self._how = server, name, how

    def __call__(self) -> None:
        await_file(self._server, self._name, "began")
        restart(self._server, self._how)
        with sync.Client(self._server.url, token=self._server.token) as client:
            client.get_sandbox(self._name).fs.write_text("go", "")


class Losing:
    """Passes requests on to a server and, when told, loses the answer to one: it was carried out."""

    def __init__(self, behind: str) -> None:
        host, _, port = behind.partition("://")[2].partition(":")
        self._behind = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lose: bytes | None = None
        self._leave = False
        self.lost = 0
        self.unanswered = False
        """The last thing that passed was from a client."""
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def lose(self, start: str, *, leave: bool = False) -> None:
        """The answer to the next request that begins so, once the server has begun to give it.

        ``leave``: and there is no way to the server from then on.
        """
        self._lose, self._leave = start.encode(), leave

    def __enter__(self) -> Losing:
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        for connection in self._open:
            _shut(connection)
        for thread in self._threads:
            thread.join(5)
        for connection in self._open:
            connection.close()

    def _close(self) -> None:
        _shut(self._listener)
        self._listener.close()

    def _run(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._behind)
            self._open += [client, server]
            losing = threading.Event()
            self._run(self._forward, client, server, losing)
            self._run(self._back, server, client, losing)

    def _forward(self, client: socket.socket, server: socket.socket, losing: threading.Event) -> None:
        try:
            while data := client.recv(1 << 16):
                if self._lose is not None and data.startswith(self._lose):
                    self._lose = None
                    losing.set()
                self.unanswered = True
                server.sendall(data)
        except OSError:
            pass
        _shut(server)

    def _back(self, server: socket.socket, client: socket.socket, losing: threading.Event) -> None:
        try:
            while data := server.recv(1 << 16):
                if losing.is_set():
                    self.lost += 1
                    if self._leave:
                        self._close()
                    break
                client.sendall(data)
                self.unanswered = False
        except OSError:
            pass
        _shut(client)
        _shut(server)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
