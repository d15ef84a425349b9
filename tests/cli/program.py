"""The program as it is installed, run as a user runs it: its exit status, and what it printed where."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 120.0


def command() -> list[str]:
    """The installed script; a clone set up by ``dev`` has none and runs the module."""
    script = Path(sys.executable).parent / "sandkeep"
    return [str(script)] if script.exists() else [sys.executable, "-m", "sandkeep"]


@dataclass(frozen=True)
class Done:
    """How a run ended."""

    status: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """One JSON document in each line."""
        return [json.loads(line) for line in self.text.splitlines()]


class Program:
    """``sandkeep`` with an environment that names one server, or none."""

    def __init__(self, env: dict[str, str]) -> None:
        kept = {name: os.environ[name] for name in ("PATH", "TMPDIR", "HOME", "LANG") if name in os.environ}
        self.env = {**kept, "PYTHONWARNINGS": "error", **env}

    def __call__(
        self, *args: str, status: int = 0, input: bytes | None = None, env: dict[str, str] | None = None
    ) -> Done:
        """Run it in a pipe and expect an exit status."""
        done = subprocess.run(
            [*command(), *args],
            env={**self.env, **(env or {})},
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        found = Done(done.returncode, done.stdout, done.stderr.decode())
        assert found.status == status, f"{args}: {found.status}\n{found.out!r}\n{found.err}"
        return found

    def fails(self, *args: str, status: int = 1, env: dict[str, str] | None = None) -> str:
        """Run it, expect an error told in one line (and a hint) without a traceback, and return that."""
        done = self(*args, status=status, env=env)
        lines = done.err.splitlines()
        assert lines and lines[0].startswith("sandkeep: "), done.err
        assert len(lines) <= 2 and all(line.startswith("  ") for line in lines[1:]), done.err
        return done.err

    def on_terminal(
        self, *args: str, status: int = 0, env: dict[str, str] | None = None, typed: bytes = b""
    ) -> bytes:
        """Run it on a terminal of 100 columns; returns every byte the terminal was sent."""
        ours, its = pty.openpty()
        termios.tcsetwinsize(its, (30, 100))
        terminal = {"TERM": "xterm-256color", **(env or {})}
        process = subprocess.Popen(
            [*command(), *args], env={**self.env, **terminal}, stdin=its, stdout=its, stderr=its
        )
        os.close(its)
        os.write(ours, typed)
        output = b""
        try:
            while data := os.read(ours, 1 << 16):
                output += data
        except OSError:
            pass  # how the end of a terminal is told
        os.close(ours)
        assert process.wait(SECONDS) == status, output
        return output

    def start(self, *args: str, **how: Any) -> subprocess.Popen[bytes]:
        """Run it in the background with its output in a pipe."""
        return subprocess.Popen(
            [*command(), *args], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how
        )
