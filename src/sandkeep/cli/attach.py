"""A program on a terminal in a sandbox, attached to the terminal here.

The terminal here is raw while the program runs, so every key reaches the program, and is put back on every
way out: the program's end, a lost connection, a signal, an error. While attached the session's timeout is
kept extended.
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
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from sandkeep.cli.ending import Ended
from sandkeep.cli.follow import write
from sandkeep.errors import SandkeepError, TimeoutInvalid

if TYPE_CHECKING:
    from sandkeep.sync import Sandbox, Terminal

_EXTENSION: Final = timedelta(minutes=5)
_MARGIN: Final = timedelta(minutes=2)
_LOOK: Final = 30.0
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SANE: Final = b"\033[?1047l\033[?1000l\033[?1002l\033[?1003l\033[?1006l\033[?2004l\033[?25h\033[0m\r\n"
"""Out of the alternate screen, no mouse reports, no bracketed paste, a cursor, no colours."""
_PASSED_ON: Final = ("TERM", "COLORTERM", "LANG", "LC_ALL")


def possible() -> bool:
    """Whether there is a terminal on both sides of us."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def attach(
    box: Sandbox,
    command: Sequence[str],
    *,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    sudo: bool = False,
    extend: bool = True,
) -> int:
    """Run a program on a terminal and be its keyboard and screen; returns its exit status."""
    program, *args = ("sudo", *command) if sudo else command
    size = os.get_terminal_size(sys.stdout.fileno())
    variables = {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)}
    sys.stdout.flush()
    with box.open_interactive(
        program,
        args,
        cwd=cwd,
        env={**variables, **(env or {})},
        columns=size.columns or 80,
        rows=size.lines or 24,
    ) as terminal:
        return _Attachment(box, terminal, extend=extend).run()


class _Attachment:
    """The main thread reads the keyboard, a second one the program, a third one watches the timeout."""

    def __init__(self, box: Sandbox, terminal: Terminal, *, extend: bool) -> None:
        self._terminal = terminal
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._keeper = _Keeper(box, self._over) if extend else None

    def run(self) -> int:
        reader = threading.Thread(target=self._read, name="screen", daemon=True)
        try:
            with _signals(self._wake), _raw(0) as sane:
                reader.start()
                if self._keeper is not None:
                    self._keeper.start()
                self._type()
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

    def _type(self) -> None:
        """Send what is typed until the program has ended."""
        sources = [0, self._woken]
        while not self._over.is_set():
            ready, _, _ = select.select(sources, [], [])
            if self._woken in ready:
                for number in os.read(self._woken, 64):
                    self._signalled(number)
            if 0 in ready and not self._over.is_set():
                data = _keys()
                if data:
                    self._send(self._terminal.write, data)
                else:
                    sources.remove(0)

    def _signalled(self, number: int) -> None:
        if number == signal.SIGWINCH:
            size = os.get_terminal_size(1)
            # A window that is being taken apart may have no size.
            self._send(lambda: self._terminal.resize(columns=size.columns or 80, rows=size.lines or 24))
        elif number in _ENDING:
            raise Ended(128 + number)

    def _send(self, send: Callable[..., None], *data: bytes) -> None:
        try:
            send(*data)
        except SandkeepError:
            pass  # whoever reads finds out what happened


def _keys() -> bytes:
    try:
        return os.read(0, 1 << 16)
    except OSError:
        # How the end of a terminal is told to those who use it.
        raise Ended(128 + signal.SIGHUP) from None


class _Keeper(threading.Thread):
    """Moves the deadline of the session further away whenever it comes close."""

    def __init__(self, box: Sandbox, over: threading.Event) -> None:
        super().__init__(name="timeout", daemon=True)
        self._box = box
        self._session = box.current_session.id
        self._over = over

    def run(self) -> None:
        while True:
            try:
                self._box.refresh()
                session = self._box.current_session
                if session.id != self._session or not session.is_running:
                    return  # never start another session for the sake of its timeout
                until = self._box.expires_at
                if until is None:
                    return
                if until - datetime.now(UTC) < _MARGIN:
                    self._box.extend_execution_time_limit(_EXTENSION)
                    continue
                wait = (until - _MARGIN - datetime.now(UTC)).total_seconds()
            except TimeoutInvalid:
                return  # as long as a session may live
            except SandkeepError:
                wait = _LOOK
            if self._over.wait(min(max(wait, 0.2), _LOOK)):
                return


@contextmanager
def _signals(wake: int) -> Iterator[None]:
    """Signals as bytes in a pipe: a handler may run at any moment, the loop knows a good one."""
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
    """The terminal in raw mode. Call what it gives when the program has put the screen in order itself."""
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
