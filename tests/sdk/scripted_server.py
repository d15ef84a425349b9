"""A server that sends scripted responses, one after another: real sockets, no parsing of requests."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import dataclass
from typing import Any

DROP = b"drop"
"""Close the connection instead of answering."""
HANG = b"hang"
"""Say nothing until the client gives up."""


def json_answer(body: Any, *headers: tuple[str, str], status: int = 200) -> bytes:
    return answer(json.dumps(body).encode(), *headers, status=status)


def lines_answer(*bodies: Any) -> bytes:
    return answer(b"".join(json.dumps(body).encode() + b"\n" for body in bodies))


def answer(data: bytes, *headers: tuple[str, str], status: int = 200) -> bytes:
    lines = [f"HTTP/1.1 {status} Scripted", f"Content-Length: {len(data)}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def refusal(status: int, code: str, *headers: tuple[str, str]) -> bytes:
    return json_answer({"error": {"code": code, "message": "scripted"}}, *headers, status=status)


@dataclass(frozen=True)
class Seen:
    """A request that arrived."""

    method: str
    path: str
    headers: dict[str, str]


class Scripted:
    """Listens while it is entered."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen: list[Seen] = []
        self.connections = 0
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Scripted:
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(5)

    def _run(self, function: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            self._run(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reader:
            while self._request(reader):
                answer = self._answers.pop(0) if self._answers else DROP
                if answer == DROP:
                    return
                if answer != HANG:
                    connection.sendall(answer)

    def _request(self, reader: Any) -> bool:
        try:
            first = reader.readline().split()
            if not first:
                return False
            headers = {}
            while line := reader.readline().strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            reader.read(int(headers.get("content-length", 0)))
        except OSError:
            return False
        self.seen.append(Seen(first[0].decode(), first[1].decode(), headers))
        return True
