"""Pages of a list that changes while it is read, and cursors that came from elsewhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkeep.errors import InvalidRequest
from sandkeep.store import PageRequest, Store
from sandkeep.store.pages import Sort, read_cursor, write_cursor
from tests.unit.store_rows import open_store, sandbox

CREATED = Sort("created", "created_ms", int)
NAMES = st.text(st.sampled_from("ab-Z_9"), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with open_store() as opened:
        yield opened


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[str, int], list[list[tuple[str, str, int]]]]:
    """What is there at first (name to creation time), and what happens between one page and the next."""
    first = draw(st.dictionaries(NAMES, st.integers(0, 3), max_size=12))
    change = st.tuples(st.sampled_from(["add", "delete"]), NAMES, st.integers(0, 4))
    return first, draw(st.lists(st.lists(change, max_size=4), max_size=8))


@settings(max_examples=150, deadline=None)
@given(
    history=histories(),
    limit=st.integers(1, 4),
    sort=st.sampled_from(["created", "name", "status_updated"]),
    order=st.sampled_from(["asc", "desc"]),
    prefix=st.sampled_from([None, "a", "Z_"]),
    tagged=st.booleans(),
)
def test_what_is_there_throughout_is_seen_once_and_in_order(
    store: Store,
    history: tuple[dict[str, int], list[list[tuple[str, str, int]]]],
    limit: int,
    sort: str,
    order: Any,
    prefix: str | None,
    tagged: bool,
) -> None:
    first, steps = history
    made = 0

    def add(name: str, time_ms: int) -> None:
        nonlocal made
        made += 1
        tags = {"t": "1"} if made % 2 else {}
        row = sandbox("p", name, id=f"box_{made}", created_ms=time_ms, status_updated_ms=-time_ms, tags=tags)
        store.sandboxes.add(row)

    for box in _everything(store):
        store.sandboxes.delete("p", box.name)
    for name, time_ms in first.items():
        add(name, time_ms)
    throughout = {box.id for box in _everything(store)}

    seen: list[Any] = []
    cursor = None
    while True:
        page = store.sandboxes.page(
            "p",
            PageRequest(limit=limit, cursor=cursor, order=order),
            sort=sort,
            name_prefix=prefix,
            tags={"t": "1"} if tagged else None,
        )
        assert len(page.items) <= limit
        seen += page.items
        cursor = page.next
        if cursor is None:
            break
        assert len(page.items) == limit, "only the last page may be short"
        for action, name, time_ms in steps.pop(0) if steps else ():
            there = store.sandboxes.find("p", name)
            if action == "add" and there is None:
                add(name, time_ms)
            elif action == "delete" and there is not None:
                store.sandboxes.delete("p", name)
                throughout.discard(there.id)

    matching = {
        box.id
        for box in _everything(store)
        if box.name.startswith(prefix or "") and (not tagged or box.tags == {"t": "1"})
    }
    shown = [box.id for box in seen]
    assert len(shown) == len(set(shown)), "nothing twice"
    assert throughout & matching <= set(shown), "nothing skipped"
    by = "name" if prefix is not None else sort
    key = {"created": "created_ms", "name": "name", "status_updated": "status_updated_ms"}[by]
    keys = [(getattr(box, key), box.id) for box in seen]
    assert keys == sorted(keys, reverse=order == "desc")


def _everything(store: Store) -> tuple[Any, ...]:
    return store.sandboxes.page("p", PageRequest(limit=100)).items


@given(key=st.integers(-(1 << 63), (1 << 63) - 1), row_id=st.text(st.characters(codec="utf-8")))
def test_a_cursor_reads_back_as_written(key: int, row_id: str) -> None:
    text = write_cursor(PageRequest(), CREATED, key, row_id)
    assert text.isascii() and not set(text) & set("+/=&?#% ")
    assert read_cursor(PageRequest(cursor=text), CREATED) == (key, row_id)


def _cursor(body: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(body).encode()).decode().rstrip("=")


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(cursor=st.text() | JSONS.map(_cursor) | st.binary().map(lambda raw: base64.b64encode(raw).decode()))
def test_any_other_text_is_refused_as_a_bad_cursor(cursor: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_cursor(PageRequest(cursor=cursor), CREATED)
    assert caught.value.field == "cursor"


@pytest.mark.parametrize(
    "body",
    [
        ["created", "desc", "text", "id"],
        ["created", "desc", True, "id"],
        ["created", "desc", 1.5, "id"],
        ["created", "desc", 1, 2],
        ["created", "desc", 1, "\ud800"],
        ["created", "desc", 1 << 63, "id"],
        ["created", "asc", 1, "id"],
        ["name", "desc", 1, "id"],
        ["created", "desc", 1],
        ["created", "desc", 1, "id", 0],
        {"created": 1, "desc": 2, "a": 3, "b": 4},
        ["created", "desc", 1, "x" * 4000],
    ],
)
def test_a_cursor_of_another_shape_or_order_is_refused(body: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_cursor(PageRequest(cursor=_cursor(body)), CREATED)
    assert caught.value.field == "cursor"


@pytest.mark.parametrize("limit", [-1, 0, 101])
def test_a_limit_out_of_range_is_refused(limit: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PageRequest(limit=limit)
    assert caught.value.field == "limit"


def test_an_unknown_sort_or_order_is_refused(store: Store) -> None:
    with pytest.raises(InvalidRequest) as caught:
        store.sandboxes.page("p", sort="colour")
    assert caught.value.field == "sort"
    with pytest.raises(InvalidRequest) as caught:
        PageRequest(order="sideways")  # type: ignore[arg-type]
    assert caught.value.field == "order"
