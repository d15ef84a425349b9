"""A proxy on loopback that hangs up in the middle of one answer."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from urllib.parse import urlsplit


class CuttingProxy:
    """Relays to a server; the first answer to a request that names ``marker`` ends after ``after`` bytes."""

    def __init__(self, server: str, *, marker: bytes, after: int) -> None:
        parts = urlsplit(server)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._marker = marker
        self._after = after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.cuts = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> CuttingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            budget: list[int] = []
            threading.Thread(target=self._requests, args=(client, server, budget), daemon=True).start()
            while True:
                try:
                    data = server.recv(65536)
                    if budget:
                        budget[0] -= len(data)
                        data = data[: max(0, len(data) + budget[0])] if budget[0] < 0 else data
                    if data:
                        client.sendall(data)
                except OSError:
                    return
                if not data or (budget and budget[0] < 0):
                    # Closing alone would wait for the other thread, which is reading from the same socket.
                    with suppress(OSError):
                        client.shutdown(socket.SHUT_RDWR)
                    return

    def _requests(self, client: socket.socket, server: socket.socket, budget: list[int]) -> None:
        try:
            while data := client.recv(65536):
                line = data.split(b"\r\n", 1)[0]
                if line.startswith(b"POST") and self._marker in line and not self.cuts:
                    self.cuts += 1
                    budget.append(self._after)
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
        except OSError:
            return
