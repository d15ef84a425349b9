"""Damage of one layer or session: what it may need is kept, the rest goes on, its record comes back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandkeep.errors import LayerError
from sandkeep.host.layers import LayerStore
from sandkeep.host.layers.tree import remove_tree
from sandkeep.host.layers.values import Doubt, Swept
from tests.host.overlay_mounts import Fixture

RECORDS = ("meta.json", "meta.copy.json")


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


@pytest.fixture
def store(fixture: Fixture) -> LayerStore:
    return LayerStore(str(fixture.data), flavour="trusted")


def publish(
    fixture: Fixture, store: LayerStore, layer: str, parent: str | None = None, holder: str | None = None
) -> None:
    fixture.session(f"s-{layer}")
    store.publish(f"s-{layer}", layer=layer, parent=parent, image="base", holder=holder)


def test_what_a_damaged_session_may_stand_on_is_kept(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "a")
    directory = fixture.session("s")
    for content in ("", "{", '{"check":1,"layer":null}', "[]"):
        (directory / "spec.json").write_text(content)
        assert store.sweep() == Swept((), (), (), ("s",))
    (directory / "spec.json").unlink()
    assert store.sweep().unknown == ("s",)
    store.discard("s")
    assert store.sweep().deleted == ("a",), "its upper is gone, so it is over"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"parent": null}', None])
def test_what_a_damaged_layer_may_stand_on_is_kept(
    fixture: Fixture, store: LayerStore, content: str | None
) -> None:
    publish(fixture, store, "a")
    publish(fixture, store, "b", "a", holder="snap")
    publish(fixture, store, "c")
    for name in RECORDS:
        path = fixture.data / "layers/b" / name
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
    assert store.recover().damaged == ("b",)
    assert [layer.id for layer in store.list()] == ["a", "c"]
    assert store.all_holders() == {"a": (), "b": ("snap",), "c": ()}
    assert store.sweep() == Swept((), (), (), ("b",))
    assert store.sweep(parents={"b": "a"}).deleted == ("c",)
    with pytest.raises(LayerError, match=r"layer b is damaged: its meta\.json") as caught:
        store.get("b")
    assert "sandkeep repair" in str(caught.value.hint)
    store.release("b", "snap")
    assert store.sweep().deleted == ("a", "b"), "nobody wants it back"


def test_a_damaged_record_is_put_back_from_its_copy(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "a")
    publish(fixture, store, "b", "a", holder="snap")
    before = store.get("b")
    path = fixture.data / "layers/b/meta.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert store.get("b") == before, place
    path.unlink()
    assert store.get("b") == before
    assert store.recover().damaged == ()
    assert path.read_bytes() == whole


def test_publishing_again_puts_a_torn_layer_right(fixture: Fixture, store: LayerStore) -> None:
    """A loss of power can leave the names of files and nothing in them."""
    publish(fixture, store, "a", holder="below")
    publish(fixture, store, "b", "a", holder="snap")
    for name in RECORDS:
        (fixture.data / "layers/b" / name).write_bytes(b"")
    os.rename(fixture.data / "layers/b", fixture.data / "layers/.new-b")
    assert store.recover().damaged == ("b",)
    again = store.publish("s-b", layer="b", parent="a", image="base", holder="snap", on_record=True)
    assert (again.parent, again.slots) == ("a", ("root",))
    assert store.get("b").depth == 2


def test_what_a_session_wrote_is_kept_though_its_layer_is_gone(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "a", holder="snap")
    fixture.session("s", "a")
    remove_tree(str(fixture.data / "layers/a"))
    store.publish("s", layer="b", parent="a", image="base", holder="other", on_record=True)
    with pytest.raises(LayerError, match="layer a, which b stands on, is missing"):
        store.get("b")
    assert store.examine().parents == {"b": "a"}


def test_a_layer_without_its_files_is_refused_by_name(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "a", holder="snap")
    remove_tree(str(fixture.data / "layers/a/fs"))
    with pytest.raises(LayerError, match="layer a is damaged: its directory fs/root is gone"):
        store.compose(fixture.rootfs, "a")
    assert list(store.examine().damaged) == ["a"]


def test_strays_are_left_alone(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "a", holder="snap")
    publish(fixture, store, "b")
    for place in ("layers", "sessions"):
        (fixture.data / place / "README").write_text("read me")
        (fixture.data / place / "lost+found").mkdir()
        os.symlink("/nowhere", fixture.data / place / "link")
    assert store.recover().damaged == ()
    assert store.sweep() == Swept(("b",), (), (), ())
    assert store.examine().strays == ("README", "link", "lost+found")


def test_a_layer_that_lost_its_references_is_set_aside_before_it_is_deleted(
    fixture: Fixture, store: LayerStore
) -> None:
    publish(fixture, store, "a", holder="one")
    publish(fixture, store, "b", "a", holder="two")
    for layer in ("a", "b"):
        remove_tree(str(fixture.data / "layers" / layer / "refs"))
    assert store.sweep(keep_ms=60_000) == Swept((), (), ("a", "b"), ())
    assert store.sweep(keep_ms=60_000) == Swept((), (), (), ())
    assert store.restore_holds({"one": "a", "other": "nothing"}) == ["a"]
    assert store.sweep(keep_ms=0) == Swept(("b",), ("b",), (), ())
    store.release("a", "one")
    assert store.sweep(keep_ms=60_000).deleted == ("a",), "this one was let go on purpose"


def test_a_reference_nobody_knows_counts_for_a_while(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "a", holder="stranger")
    assert store.doubt("a", "stranger", keep_ms=60_000) == Doubt(True, False)
    assert store.doubt("a", "stranger", keep_ms=60_000) == Doubt(False, False)
    assert store.sweep(keep_ms=0).deleted == ()
    assert store.restore_holds({"stranger": "a"}) == []
    assert store.doubt("a", "stranger", keep_ms=0) == Doubt(True, False), "it was known for a while"
    assert store.doubt("a", "stranger", keep_ms=0) == Doubt(False, True)
    assert store.sweep(keep_ms=60_000).deleted == ("a",)
