"""What the same machine does without us: a bare process, bwrap, runc, tar, cp, a loopback connection."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
from types import TracebackType

from benchmarks.rows import Samples

SUBPROCESS, BWRAP, RUNC, RUNC_EXEC = "subprocess.run echo", "bwrap echo", "runc run echo", "runc exec echo"
BWRAP_TRUE, RUNC_TRUE = "bwrap true", "runc run true"
TAR, COPY, LOOPBACK = "tar | tar", "cp", "loopback TCP"

_LINKS = ("bin", "sbin", "lib", "lib64")
_ECHO, _TRUE = ("echo", "x"), ("true",)


class Commands:
    """Programs that start a process in some isolation; those that are not installed are left out."""

    def __init__(self, area: str) -> None:
        self._commands: dict[str, list[str]] = {SUBPROCESS: list(_ECHO)}
        self._runc: list[str] = []
        self._turn = 0
        if bwrap := shutil.which("bwrap"):
            self._commands[BWRAP] = _bwrap(bwrap, _ECHO)
            self._commands[BWRAP_TRUE] = _bwrap(bwrap, _TRUE)
        if (runc := shutil.which("runc")) and os.geteuid() == 0:
            self._runc = [runc, "--root", f"{area}/runc"]
            self._commands[RUNC] = [*self._runc, "run", "--bundle", _bundle(f"{area}/echo", _ECHO), "echo"]
            self._commands[RUNC_TRUE] = [
                *self._runc,
                "run",
                "--bundle",
                _bundle(f"{area}/true", _TRUE),
                "true",
            ]
            waiting = _bundle(f"{area}/waiting", ("sleep", "3600"))
            detached = [*self._runc, "run", "--detach", "--bundle", waiting, "waiting"]
            subprocess.run(detached, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self._commands[RUNC_EXEC] = [*self._runc, "exec", "waiting", *_ECHO]

    def __enter__(self) -> Commands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runc:
            subprocess.run([*self._runc, "delete", "--force", "waiting"], check=False, capture_output=True)

    def time(self, samples: Samples, *names: str) -> None:
        """Run those of the named commands that are there, once each, every time another one first.

        A program that runs after a similar one finds the machine warm.
        """
        self._turn += 1
        first = self._turn % len(names)
        for name in (*names[first:], *names[:first]):
            if name in self._commands:
                with samples.of(name):
                    subprocess.run(self._commands[name], check=True, capture_output=True)

    def time_at_once(self, samples: Samples, what: str, count: int) -> None:
        """Start that many containers together and wait until all have ended. Do nothing without runc."""
        if RUNC_TRUE not in self._commands:
            return
        command = self._commands[RUNC_TRUE][:-1]
        with samples.of(what):
            started = [
                subprocess.Popen([*command, f"true-{number}"], stdout=subprocess.DEVNULL)
                for number in range(count)
            ]
            statuses = [process.wait() for process in started]
        assert not any(statuses), statuses


def _bwrap(program: str, argv: tuple[str, ...]) -> list[str]:
    command = [program, "--unshare-all", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for link in _LINKS:
        command += ["--symlink", f"usr/{link}", f"/{link}"]
    return [*command, "--tmpfs", "/tmp", *argv]


def _bundle(path: str, argv: tuple[str, ...]) -> str:
    """The usual default container, with the host's /usr bound instead of an image."""
    os.makedirs(f"{path}/rootfs/usr")
    for link in _LINKS:
        os.symlink(f"usr/{link}", f"{path}/rootfs/{link}")
    subprocess.run(["runc", "spec", "--bundle", path], check=True)
    with open(f"{path}/config.json", encoding="utf-8") as handle:
        config = json.load(handle)
    config["process"] |= {"terminal": False, "args": list(argv)}
    config["root"]["readonly"] = False
    bind = {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]}
    config["mounts"].append(bind)
    with open(f"{path}/config.json", "w", encoding="utf-8") as handle:
        json.dump(config, handle)
    return path


def tar_copy(source: str, target: str) -> None:
    """A tree through two tars and a pipe, as one would copy it without us."""
    os.makedirs(target)
    with subprocess.Popen(["tar", "-C", source, "-cf", "-", "."], stdout=subprocess.PIPE) as packing:
        subprocess.run(["tar", "-C", target, "-xf", "-"], stdin=packing.stdout, check=True)
    if packing.returncode:
        raise subprocess.CalledProcessError(packing.returncode, "tar")


def copy(source: str, target: str) -> None:
    """A file's bytes, really copied."""
    subprocess.run(["cp", "--reflink=never", "--sparse=never", source, target], check=True)


def capture(argv: list[str]) -> bytes:
    """All a program prints."""
    return subprocess.run(argv, check=True, capture_output=True).stdout


class Sender:
    """A server on loopback that sends a number of bytes to each client."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="sender")
        self._thread.start()

    def _serve(self) -> None:
        piece = bytes(1 << 18)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                left = self._size
                try:
                    while left:
                        left -= connection.send(memoryview(piece)[: min(left, len(piece))])
                except OSError:
                    pass  # the reader went away

    def close(self) -> None:
        # Closing alone does not wake a thread that is accepting.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


RECEIVE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
room, size, began = bytearray(1 << 18), 0, time.perf_counter()
while count := connection.recv_into(room):
    size += count
print(size, time.perf_counter() - began)
"""
"""A program that reads all a `Sender` sends and prints how much and how long it took."""
