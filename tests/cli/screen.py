"""A real terminal for the program: a tmux of its own, with keys to press and a screen to look at."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.program import command

SECONDS = 60.0
_ASK_STATUS = "; echo status=$?"


def _printed(line: str) -> str:
    """Return what was printed on a line of the screen after the command typed there, if any.

    A typed command that ends at the last column is joined with the line after it.
    """
    return line.rpartition(_ASK_STATUS)[2]


class Screen:
    """A shell on a terminal of 100 columns and 30 rows."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("no tmux to be a terminal: apt-get install tmux")
        self._socket = str(directory / f"{secrets.token_hex(4)}.tmux")
        self._env = {**env, "TERM": "xterm-256color", "TMUX_TMPDIR": str(directory)}
        rc = directory / "bashrc"
        rc.write_text("PS1='here> '\n")
        # As words and not as one line: tmux gives a line to the user's login shell, and with some
        # shells the bash would be a child of that instead of the pane's own process.
        shell = ["bash", "--noprofile", "--rcfile", str(rc)]
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", *shell)
        try:
            # Otherwise the screen is as small as the smallest client, and there is none.
            self._tmux("set-option", "-g", "window-size", "manual")
            self.wait("here>")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        pid = int(self._tmux("display-message", "-p", "#{pid}"))
        self._tmux("kill-server")
        deadline = time.monotonic() + SECONDS
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            time.sleep(0.02)

    def sandkeep(self, *args: str) -> None:
        """Run it, and print its exit status afterwards."""
        self.clear()
        line = shlex.join([*command(), *args])
        self.press(f"{line}{_ASK_STATUS}", "Enter")

    def press(self, *keys: str) -> None:
        """Text is typed, names such as ``Enter`` and ``C-c`` are keys."""
        self._tmux("send-keys", *keys)

    def clear(self) -> None:
        self.press("clear", "Enter")
        self.until(lambda text: text.strip() == "here>", "an empty screen")

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    @property
    def text(self) -> str:
        # Lines that are longer than the screen are joined again.
        return self._tmux("capture-pane", "-p", "-J")

    @property
    def styled(self) -> str:
        """The same with its colours."""
        return self._tmux("capture-pane", "-p", "-J", "-e")

    def wait(self, wanted: str) -> str:
        """Wait until the screen shows a text that was not typed at the prompt."""
        return self.until(lambda text: any(wanted in _printed(line) for line in text.splitlines()), wanted)

    def until(self, holds: Callable[[str], bool], what: str) -> str:
        deadline = time.monotonic() + SECONDS
        while not holds(text := self.text):
            assert time.monotonic() < deadline, f"no {what!r} on the screen:\n{text}"
            time.sleep(0.05)
        return text

    def settings(self) -> str:
        """How the terminal is set, its size aside."""
        self.clear()
        self.press("stty -g", "Enter")
        text = self.until(lambda text: text.count(":") > 20, "settings")
        return next(line for line in text.splitlines() if line.count(":") > 20)

    def pid_of(self, word: str) -> int:
        """The process below this screen's shell whose command line holds a word."""
        shell = self._tmux("display-message", "-p", "#{pane_pid}").strip()
        children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        for child in children:
            if word.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError(f"nothing with {word!r} runs here")

    def _tmux(self, *args: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *args], env=self._env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
