"""Names people read, ids machines sort."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkeep.engine.names import ADJECTIVES, NOUNS, RESERVED, IdKind, check_name, new_id, new_name
from sandkeep.errors import InvalidRequest


@pytest.mark.parametrize("name", ["a", "A-1_b", "_x", "9", "x" * 128, "Sessions", "sessions-1"])
def test_letters_digits_dash_and_underscore_make_a_name(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 129,
        "-a",
        "a b",
        "a/b",
        "..",
        "a.b",
        "é",
        "٣",
        "a\n",
        "\n",
        "a\0",
        "\ud800",
        *sorted(RESERVED),
    ],
)
def test_anything_else_is_refused_naming_the_field(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_name(name)
    assert caught.value.field == "name"


@given(st.text())
def test_an_accepted_name_is_one_url_path_segment(name: str) -> None:
    try:
        check_name(name)
    except InvalidRequest:
        return
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,128}", name)


def test_generated_names_are_valid_readable_and_differ() -> None:
    names = {new_name() for _ in range(1000)}
    assert len(names) == 1000
    for name in names:
        assert re.fullmatch(r"[a-z]+-[a-z]+-[a-z0-9]{4}", check_name(name))


def test_words_are_many_plain_and_short() -> None:
    for words in (ADJECTIVES, NOUNS):
        assert len(words) == len(set(words)) >= 100
        assert all(word.isascii() and word.isalpha() and word.islower() and len(word) <= 8 for word in words)


@pytest.mark.parametrize("kind", get_args(IdKind))
def test_ids_are_one_url_safe_word_with_their_prefix(kind: IdKind) -> None:
    assert re.fullmatch(kind + "_[A-Za-z0-9]{22}", new_id(kind, now_ms=1_780_000_000_000))


@given(st.integers(0, 62**8 - 1), st.integers(0, 62**8 - 1))
def test_ids_sort_as_their_times_do(first: int, second: int) -> None:
    early, late = sorted((first, second))
    if early < late:
        assert new_id("sbx", now_ms=early) < new_id("sbx", now_ms=late)


def test_ids_of_one_millisecond_differ() -> None:
    assert len({new_id("cmd", now_ms=5) for _ in range(1000)}) == 1000
