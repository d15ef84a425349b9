"""A supervisor as it spoke protocol 1, frozen: a program that holds a session's directory.

It shares nothing with the sources and is not changed when the protocol is. When the oldest protocol that
clients speak moves on, another one is frozen. Arguments: the directory, the newest and the oldest protocol to
claim, and ``no-record`` to leave no ``state.json``. The operations it was sent are in ``received``.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import threading
from typing import Any


def receive(sock: socket.socket) -> tuple[dict[str, Any] | None, bytes] | None:
    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = sock.recv(size - len(data))
            if not piece:
                raise ConnectionError
            data += piece
        return data

    try:
        text, blob = struct.unpack("!II", exactly(8))
        return (json.loads(exactly(text)) if text else None), exactly(blob)
    except ConnectionError:
        return None


def send(sock: socket.socket, body: dict[str, Any] | None, blob: bytes = b"") -> None:
    text = b"" if body is None else json.dumps(body).encode()
    sock.sendall(struct.pack("!II", len(text), len(blob)) + text + blob)


class Supervisor:
    def __init__(self, directory: str, newest: int, oldest: int) -> None:
        self.directory = directory
        self.said = {"protocol": newest, "oldest": oldest}
        self.files: dict[str, bytes] = {}
        self.deadline: int | None = None
        self.status = "running"

    def state(self) -> dict[str, Any]:
        spoken = self.said if self.said["protocol"] > 1 else {"protocol": self.said["protocol"]}
        return {**spoken, "generation": 1, "status": self.status, "deadline_ms": self.deadline}

    def save(self) -> None:
        with open(f"{self.directory}/state.json.new", "w") as handle:
            json.dump(self.state(), handle)
        os.replace(f"{self.directory}/state.json.new", f"{self.directory}/state.json")

    def serve(self, sock: socket.socket) -> None:
        while (frame := receive(sock)) is not None and self.status == "running":
            body, _ = frame
            assert body is not None
            op = body["op"]
            with open(f"{self.directory}/received", "a") as handle:
                handle.write(f"{op}\n")
            result: dict[str, Any] = {}
            if op == "hello":
                result = self.said
            elif op == "session.info":
                result = self.state()
            elif op == "session.extend":
                self.deadline = body["deadline_ms"]
                result = {"deadline_ms": self.deadline}
            elif op == "session.stop":
                self.status = "stopped"
                self.save()
                result = self.state()
            elif op in ("process.start", "process.wait"):
                # It does not know ``more`` and ``end``, so it does not repeat them.
                ended = {"status": "exited", "exit_code": 7, "signal": None, "reason": None}
                times = {"started_ms": 1, "finished_ms": 2, "cpu_ms": None}
                what = {"id": body["process"], "argv": ["true"], "cwd": "/", "user": "root", "pty": False}
                result = {"process": {**what, "pid": 2, **ended, **times}}
            elif op == "fs.write":
                data = b""
                while (piece := receive(sock)) is not None and piece[0] is None:
                    data += piece[1]
                self.files[body["path"]] = data
                result = {"bytes_written": len(data)}
            elif op == "fs.read":
                send(sock, None, self.files[body["path"]])
                result = {"sent": len(self.files[body["path"]])}
            send(sock, {"id": body["id"], "ok": result})
            if self.status != "running":
                os._exit(0)


def main(directory: str, newest: str, oldest: str, *options: str) -> None:
    os.chdir(directory)
    lock = os.open("lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    supervisor = Supervisor(directory, int(newest), int(oldest))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("supervisor.sock")
    listener.listen()
    if "no-record" not in options:
        supervisor.save()
    print("ready", flush=True)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=supervisor.serve, args=(sock,), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
