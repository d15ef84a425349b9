"""Signs of life on a terminal while something takes a while. Nothing at all anywhere else."""

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
"""Seconds before anything is shown: most things are over by then."""
_LONG: Final = 3
"""Seconds after which people want to know how long it has been."""
_EVERY: Final = 0.1
_BAR: Final = 24
_NARROWEST: Final = 12
_ERASE: Final = "\r\033[K"


def visible(*, quiet: bool) -> bool:
    """Whether somebody is there to see it, on a terminal that can erase a line."""
    return not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def busy(text: str, *, quiet: bool) -> Iterator[None]:
    """Say what is being done, if it takes longer than a moment."""
    text = clean(text)
    began = time.monotonic()

    def line() -> str:
        seconds = int(time.monotonic() - began)
        return f"{text}  {seconds}s" if seconds >= _LONG else text

    with _shown(line, quiet=quiet):
        yield


class Bar:
    """How far something has come: a bar when the end is known, a count when it is not."""

    def __init__(self, text: str) -> None:
        self._text = clean(text)
        self._began = time.monotonic()
        self._at: tuple[int, int | None, str] = (0, None, "")

    def update(self, done: int, total: int | None = None, *, what: str = "") -> None:
        """So many bytes are done."""
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
        # Words give way to the measure, which is what people look for.
        text = cut(self._text, max(_room() - len(measure) - 1, _NARROWEST))
        return f"{text} {measure}  {clean(what)}".rstrip()


@contextmanager
def measured(text: str, *, quiet: bool) -> Iterator[Bar]:
    """Say how far it is, if it takes longer than a moment."""
    bar = Bar(text)
    with _shown(bar.line, quiet=quiet):
        yield bar


@contextmanager
def _shown(line: Callable[[], str], *, quiet: bool) -> Iterator[None]:
    """Draw a line over and over from a thread of its own: what is reported may come seldom, or not at all
    while the other side still takes in what was sent."""
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
