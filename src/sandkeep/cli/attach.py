"""A program on a terminal in a sandbox, attached to the local terminal.

The local terminal is in raw mode while the program runs, so that every key reaches the program. Its mode is
restored however that ends: by the program's end, a lost connection, a signal or an error.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from sandkeep.cli.exit_status import Ended
from sandkeep.cli.follow import write
from sandkeep.errors import SandkeepError

if TYPE_CHECKING:
    from sandkeep.sync import Sandbox, Terminal

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SANE: Final = b"\033[?1047l\033[?1000l\033[?1002l\033[?1003l\033[?1006l\033[?2004l\033[?25h\033[0m\r\n"
"""Leaves the alternate screen, ends mouse reports and bracketed paste, shows the cursor, resets colours."""
_DETACH_KEYS: Final = b"\x10\x11"
"""Ctrl-P Ctrl-Q."""
_PASSED_ON: Final = ("TERM", "COLORTERM", "LANG", "LC_ALL")


def possible() -> bool:
    """Whether standard input and standard output are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def attach(
    box: Sandbox,
    command: Sequence[str],
    *,
    cwd: str | None = None,
    env: dict[str, str | None] | None = None,
    secrets: dict[str, str] | None = None,
    sudo: bool = False,
    kill_after: timedelta | None = None,
    extend: bool = True,
    detachable: bool = False,
    metadata: dict[str, str] | None = None,
) -> int:
    """Run a program on a terminal, be its keyboard and screen, and return its exit status.

    Raises:
        Detached: the user detached from a program that is detachable.
    """
    program, *args = ("sudo", *command) if sudo else command
    size = os.get_terminal_size(sys.stdout.fileno())
    variables = {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)}
    sys.stdout.flush()
    with box.open_interactive(
        program,
        args,
        cwd=cwd,
        env={**variables, **(env or {})},
        secrets=secrets,
        columns=size.columns or 80,
        rows=size.lines or 24,
        kill_after=kill_after,
        extend_timeout=extend,
        detachable=detachable,
        metadata=metadata,
    ) as terminal:
        return _Attachment(terminal, detachable=detachable).run()


def attach_again(box: Sandbox, process_id: str, *, extend: bool = True) -> int:
    """Be a keyboard and screen of a program that runs on a terminal, and return its exit status.

    Raises:
        Detached: the user detached.
    """
    size = os.get_terminal_size(sys.stdout.fileno())
    sys.stdout.flush()
    with box.attach_terminal(
        process_id, columns=size.columns or 80, rows=size.lines or 24, extend_timeout=extend
    ) as terminal:
        return _Attachment(terminal, detachable=True).run()


class Detached(Exception):
    """The user has left the program, which goes on."""

    def __init__(self, process_id: str) -> None:
        super().__init__(process_id)
        self.process_id = process_id


class _Attachment:
    """The main thread reads the keyboard, a second thread reads the program's output."""

    def __init__(self, terminal: Terminal, *, detachable: bool) -> None:
        self._terminal = terminal
        self._detachable = detachable
        self._held = b""
        """The first of the two keys that detach, until the next key is known."""
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def run(self) -> int:
        reader = threading.Thread(target=self._read, name="screen", daemon=True)
        try:
            with _signals(self._wake), _raw(0) as sane:
                reader.start()
                self._forward_input()
                reader.join()
                code = self._terminal.returncode
                if self._failure is None and code is not None:
                    sane()
        finally:
            self._over.set()
            os.close(self._woken)
            wake, self._wake = self._wake, -1
            os.close(wake)
        if self._failure is not None:
            raise self._failure
        assert code is not None
        return code

    def _read(self) -> None:
        try:
            while data := self._terminal.read():
                write(1, data)
        except BaseException as error:
            self._failure = error
        finally:
            self._over.set()
            if self._wake >= 0:
                os.write(self._wake, b"\0")

    def _forward_input(self) -> None:
        """Send typed keys until the program has ended."""
        sources = [0, self._woken]
        while not self._over.is_set():
            ready, _, _ = select.select(sources, [], [])
            if self._woken in ready:
                for number in os.read(self._woken, 64):
                    self._signalled(number)
            if 0 in ready and not self._over.is_set():
                data = _keys()
                if data:
                    keys, detach = self._part(data)
                    self._send(self._terminal.write, keys)
                    if detach:
                        raise Detached(self._terminal.process_id or "")
                else:
                    sources.remove(0)

    def _part(self, data: bytes) -> tuple[bytes, bool]:
        """Return the keys for the program, and whether those that detach were typed after them.

        A key that may be the first of the two waits for the next one.
        """
        if not self._detachable:
            return data, False
        keys, detach, _ = (self._held + data).partition(_DETACH_KEYS)
        self._held = b""
        if not detach and keys.endswith(_DETACH_KEYS[:1]):
            keys, self._held = keys[:-1], keys[-1:]
        return keys, bool(detach)

    def _signalled(self, number: int) -> None:
        if number == signal.SIGWINCH:
            size = os.get_terminal_size(1)
            # A window that is being closed may have no size.
            self._send(lambda: self._terminal.resize(columns=size.columns or 80, rows=size.lines or 24))
        elif number in _ENDING:
            raise Ended(128 + number)

    def _send(self, send: Callable[..., None], *data: bytes) -> None:
        try:
            send(*data)
        except SandkeepError:
            pass  # the thread that reads the output finds out why


def _keys() -> bytes:
    try:
        return os.read(0, 1 << 16)
    except OSError:
        # Reading from a terminal that is gone fails with EIO.
        raise Ended(128 + signal.SIGHUP) from None


@contextmanager
def _signals(wake: int) -> Iterator[None]:
    """Turn signals into bytes in a pipe, which the loop reads: a handler can run at any point."""
    before = {number: signal.getsignal(number) for number in (signal.SIGWINCH, *_ENDING)}
    for number in before:
        signal.signal(number, lambda *_: None)
    held = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(held)
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def _raw(fd: int) -> Iterator[Callable[[], None]]:
    """Put the terminal into raw mode. Call what it yields if the program has restored the screen itself."""
    kept = termios.tcgetattr(fd)
    orderly: list[bool] = []
    tty.setraw(fd)
    try:
        yield lambda: orderly.append(True)
    finally:
        if not orderly:
            try:
                os.write(1, _SANE)
            except OSError:
                pass  # the terminal itself is gone
        try:
            termios.tcsetattr(fd, termios.TCSADRAIN, kept)
        except termios.error:
            pass
