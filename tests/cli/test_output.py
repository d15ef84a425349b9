"""What people read: tables that fit, words for sizes and times, nothing a terminal would act upon."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkeep.cli.output import ago, clean, columns_of, cut, fitted, lifetime, plain, size, span
from sandkeep.cli.values import DURATION, LIFETIME, SIZE
from sandkeep.spec import Resources
from sandkeep.states import SessionStatus


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (300 << 20, "300 MiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.004, "4ms"),
        (2.5, "2.5s"),
        (45, "45s"),
        (300, "5m"),
        (5400, "1h 30m"),
        (86400 * 8, "8d"),
        (90061, "1d 1h"),
    ],
)
def test_spans(seconds: float, shown: str) -> None:
    assert span(timedelta(seconds=seconds)) == shown


def test_a_lifetime_of_zero_is_for_ever() -> None:
    assert (lifetime(timedelta()), lifetime(None), lifetime(timedelta(days=7))) == ("none", "-", "7d")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-3, "3 seconds ago"),
        (-70, "1 minute ago"),
        (-7200, "2 hours ago"),
        (86400 * 30, "in 30 days"),
        (0, "now"),
    ],
)
def test_times_are_relative_to_now(seconds: int, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return moment + timedelta(milliseconds=20)

    monkeypatch.setattr("sandkeep.cli.output.datetime", Clock)
    assert ago(moment + timedelta(seconds=seconds)) == shown


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("5m", 300),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("7d", 604800),
        ("2 weeks", 1209600),
        ("500ms", 0.5),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert DURATION.convert(text, None, None) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "5", "0", "none", "m", "5x", "5m extra", "-5m", "0s"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        DURATION.convert(text, None, None)


@pytest.mark.parametrize("text", ["none", "0", "NONE"])
def test_for_ever_is_a_lifetime(text: str) -> None:
    assert LIFETIME.convert(text, None, None) == timedelta()


@pytest.mark.parametrize(
    ("text", "count"), [("512", 512), ("1k", 1024), ("1.5M", 1572864), ("2GiB", 2 << 30)]
)
def test_sizes_that_are_typed(text: str, count: int) -> None:
    assert SIZE.convert(text, None, None) == count


def test_control_characters_are_spelled_out() -> None:
    assert clean("a\x1b[31mred\nb") == "a\\x1b[31mred\\nb"
    assert clean("é 漢 😀") == "é 漢 😀"


@given(st.text(max_size=60), st.integers(2, 40))
def test_a_shortened_text_fits(text: str, width: int) -> None:
    assert columns_of(cut(text, width)) <= max(width, 1)


@given(st.lists(st.integers(1, 80), min_size=1, max_size=8), st.integers(60, 200))
def test_columns_fit_and_only_wide_ones_are_shortened(widths: list[int], room: int) -> None:
    found = fitted(widths, room)
    assert sum(found) <= max(room, 6 * len(widths))
    assert all(new <= old for new, old in zip(found, widths, strict=True))
    if sum(widths) <= room:
        assert found == widths
    if widths[0] <= room // 2 and room // 2 + 6 * (len(widths) - 1) <= room:
        assert found[0] == widths[0], "names and ids are whole"


def test_values_become_json_with_the_users_own_keys_untouched() -> None:
    body = plain(
        {
            "status": SessionStatus.RUNNING,
            "resources": Resources(2),
            "time": datetime(2026, 1, 2, 3, 4, 5, 678000, UTC),
            "tags": {"my_own_key": "x"},
            "spans": (timedelta(minutes=1),),
        }
    )
    assert body == {
        "status": "running",
        "resources": {"cpus": 2, "memoryMb": 4096, "diskMb": None, "pids": None, "exact": True},
        "time": "2026-01-02T03:04:05.678Z",
        "tags": {"my_own_key": "x"},
        "spans": [60.0],
    }
