"""Progress on a terminal while something takes long. Prints nothing if standard error is not a terminal."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from sandkeep.cli.output import clean, cut, size, terminal_width

_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PATIENCE: Final = 0.4
"""Seconds before anything is shown: most work is done by then."""
_LONG: Final = 3
"""Seconds after which the elapsed time is shown."""
_EVERY: Final = 0.1
_BAR: Final = 24
_NARROWEST: Final = 12
_ERASE: Final = "\r\033[K"


def visible(*, quiet: bool) -> bool:
    """Whether standard error is a terminal that can erase a line."""
    return not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def busy(text: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being done, if it takes long; yields a function that changes the text."""
    now = clean(text)
    began = time.monotonic()

    def say(what: str) -> None:
        nonlocal now
        now = clean(what)

    def line() -> str:
        seconds = int(time.monotonic() - began)
        return f"{now}  {seconds}s" if seconds >= _LONG else now

    with _shown(line, quiet=quiet):
        yield say


@contextmanager
def starting(text: str, *, quiet: bool) -> Iterator[None]:
    """As `busy`, for the start of a sandbox: also shows what it waits for, as the SDK logs it."""
    if not visible(quiet=quiet):
        yield
        return
    import logging

    with busy(text, quiet=quiet) as say:

        class Shown(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                say(f"{text}: {record.getMessage()}")

        logger, shown = logging.getLogger("sandkeep"), Shown(logging.INFO)
        before = logger.level
        logger.addHandler(shown)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.setLevel(before)
            logger.removeHandler(shown)


@contextmanager
def counted(text: str, total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show how many of several are done; yields a function to call after each."""
    done = 0

    def one_more() -> None:
        nonlocal done
        done += 1

    with _shown(lambda: f"{clean(text)}  {done} of {total}" if total > 1 else clean(text), quiet=quiet):
        yield one_more


class Bar:
    """Progress in bytes: a bar when the total is known, a count when it is not."""

    def __init__(self, text: str) -> None:
        self._text = clean(text)
        self._began = time.monotonic()
        self._at: tuple[int, int | None, str] = (0, None, "")

    def update(self, done: int, total: int | None = None, *, what: str = "") -> None:
        """Set how many bytes are done."""
        self._at = (done, total, what)

    def line(self) -> str:
        done, total, what = self._at
        if not done and total is None:
            return self._text
        rate = size(int(done / max(time.monotonic() - self._began, 0.001)))
        if total:
            filled = min(_BAR, _BAR * done // total)
            bar = "━" * filled + "╌" * (_BAR - filled)
            measure = f"{bar} {min(100, 100 * done // total)}%  {size(done)} of {size(total)}  {rate}/s"
        else:
            measure = f"{size(done)}  {rate}/s"
        # Shorten the text rather than the figures.
        text = cut(self._text, max(_room() - len(measure) - 1, _NARROWEST))
        return f"{text} {measure}  {clean(what)}".rstrip()


@contextmanager
def measured(text: str, *, quiet: bool) -> Iterator[Bar]:
    """Show progress in bytes, if it takes long."""
    bar = Bar(text)
    with _shown(bar.line, quiet=quiet):
        yield bar


@contextmanager
def _shown(line: Callable[[], str], *, quiet: bool) -> Iterator[None]:
    """Redraw a line from a thread of its own: progress reports can be rare, or absent while the server still
    reads what was sent."""
    if not visible(quiet=quiet):
        yield
        return
    over = threading.Event()

    def show() -> None:
        if over.wait(_PATIENCE):
            return
        for frame in itertools.cycle(_FRAMES):
            sys.stderr.write(f"{_ERASE}{frame} {_fit(line())}")
            sys.stderr.flush()
            if over.wait(_EVERY):
                break
        sys.stderr.write(_ERASE)
        sys.stderr.flush()

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _room() -> int:
    return (terminal_width(sys.stderr) or 80) - 3


def _fit(text: str) -> str:
    return cut(text, _room())
