"""Runs in a machine of the lab as root: takes commands from a virtio port and answers with how they ended.

One JSON object per line both ways. A command is ``{"id", "argv", "env", "input", "timeout"}``, its answer
``{"id", "status", "out", "err"}``; ``status`` is negative for a signal and null when the time was up. The
first line after each start is ``{"hello": BOOT ID}``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from typing import Any, BinaryIO

PORT = "/dev/virtio-ports/sandkeep.lab"


class Port:
    def __init__(self) -> None:
        self._fd = os.open(PORT, os.O_RDWR | os.O_CLOEXEC)
        self._one_line_at_a_time = threading.Lock()

    def lines(self) -> BinaryIO:
        return os.fdopen(os.dup(self._fd), "rb")

    def send(self, message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        with self._one_line_at_a_time:
            while data:
                data = data[os.write(self._fd, data) :]


def execute(command: dict[str, Any]) -> dict[str, Any]:
    # Files and not pipes: a server that a command leaves in the background may hold its output open.
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin.write(command["input"].encode(errors="surrogateescape"))
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                command["argv"],
                env={**os.environ, **command["env"]},
                cwd="/",
                stdin=stdin,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            return {"id": command["id"], "status": 127, "out": "", "err": str(error)}
        status: int | None
        try:
            status = process.wait(command["timeout"])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        answer = {"id": command["id"], "status": status}
        for name, file in (("out", out), ("err", err)):
            file.seek(0)
            answer[name] = file.read().decode(errors="surrogateescape")
        return answer


def main() -> None:
    port = Port()
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        port.send({"hello": file.read().strip()})

    def serve(line: bytes) -> None:
        port.send(execute(json.loads(line)))

    for line in port.lines():
        threading.Thread(target=serve, args=(line,), daemon=True).start()


if __name__ == "__main__":
    main()
