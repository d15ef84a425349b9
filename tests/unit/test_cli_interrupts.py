"""A signal that asks to end is heard, wherever it arrives."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from sandkeep.cli import interrupts
from sandkeep.cli.exit_status import Ended


class Callback:
    """Lets the interpreter call something whose exceptions it prints and forgets."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGTERM, Ended), (signal.SIGHUP, Ended), (signal.SIGINT, KeyboardInterrupt)],
)
def test_what_came_to_nothing_is_raised_again(
    number: signal.Signals, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", forgotten.append)
    with pytest.raises(raised), interrupts.raised(*interrupts.ENDING):
        callback = Callback(lambda: os.kill(os.getpid(), number))
        del callback
        assert len(forgotten) == 1
        interrupts.raise_pending()
    assert interrupts.take_pending() == []


def test_an_error_that_was_made_of_it_is_not_told() -> None:
    with pytest.raises(Ended), interrupts.raised(*interrupts.ENDING):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            raise RuntimeError("a callback failed") from error


def test_it_goes_through_those_who_catch_everything() -> None:
    with pytest.raises(Ended) as ended, interrupts.raised(*interrupts.ENDING):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception:
            pytest.fail("it was caught on the way")
    assert ended.value.status == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_we_were_started_to_ignore_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.raised(*interrupts.ENDING):
            os.kill(os.getpid(), signal.SIGHUP)
            interrupts.raise_pending()
    finally:
        signal.signal(signal.SIGHUP, before)
