"""Signs of life on a terminal while something takes a while. Nothing at all anywhere else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
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
    """Whether somebody is there to see it."""
    return not quiet and sys.stderr.isatty()


@contextmanager
def busy(text: str, *, quiet: bool) -> Iterator[None]:
    """Say what is being done, if it takes longer than a moment."""
    if not visible(quiet=quiet):
        yield
        return
    over = threading.Event()
    began = time.monotonic()

    def show() -> None:
        if over.wait(_PATIENCE):
            return
        frame = 0
        while True:
            seconds = int(time.monotonic() - began)
            line = f"{text}  {seconds}s" if seconds >= _LONG else text
            sys.stderr.write(f"{_ERASE}{_FRAMES[frame % len(_FRAMES)]} {_fit(line)}")
            sys.stderr.flush()
            frame += 1
            if over.wait(_EVERY):
                break
        sys.stderr.write(_ERASE)
        sys.stderr.flush()

    thread = threading.Thread(target=show, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Bar:
    """How far something has come: a bar when the end is known, a count when it is not."""

    def __init__(self, text: str, *, quiet: bool) -> None:
        self._text = text
        self._visible = visible(quiet=quiet)
        self._began = time.monotonic()
        self._last = self._began + _PATIENCE - _EVERY
        self._shown = False

    def update(self, done: int, total: int | None = None, *, what: str = "") -> None:
        """So many bytes are done."""
        now = time.monotonic()
        if not self._visible or now - self._last < _EVERY:
            return
        self._last = now
        self._shown = True
        rate = size(int(done / max(now - self._began, 0.001)))
        if total:
            filled = min(_BAR, _BAR * done // total)
            bar = "━" * filled + "╌" * (_BAR - filled)
            measure = f"{bar} {min(100, 100 * done // total)}%  {size(done)} of {size(total)}  {rate}/s"
        else:
            measure = f"{size(done)}  {rate}/s"
        # Words give way to the measure, which is what people look for.
        text = cut(clean(self._text), max(_room() - len(measure) - 1, _NARROWEST))
        line = f"{text} {measure}  {clean(what)}".rstrip()
        sys.stderr.write(f"{_ERASE}{_fit(line)}")
        sys.stderr.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write(_ERASE)
            sys.stderr.flush()


def _room() -> int:
    return (terminal_width(sys.stderr) or 80) - 3


def _fit(text: str) -> str:
    return cut(text, _room())
