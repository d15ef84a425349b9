"""Folding chains: the same tree through a real overlay mount before and after, whatever was done to it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sandkeep.errors import InvalidRequest, LayerError
from sandkeep.host.layers import LayerStore
from sandkeep.host.layers import store as store_module
from sandkeep.host.layers.tree import remove_tree
from sandkeep.host.rootfs import Lower, Rootfs, Slot
from tests.host.overlay_mounts import Fixture, locked, mounted, needs_root, plant, run_forked, shake, write


@pytest.fixture
def memory() -> Iterator[Path]:
    """Many small files: kept in memory."""
    directory = Path(tempfile.mkdtemp(prefix="sandkeep-fold-", dir="/dev/shm"))
    yield directory
    remove_tree(str(directory))


@pytest.fixture
def fixture(memory: Path) -> Fixture:
    return Fixture(memory / "data")


@pytest.fixture
def store(fixture: Fixture) -> LayerStore:
    return LayerStore(str(fixture.data), flavour="trusted")


def generation(
    fixture: Fixture,
    store: LayerStore,
    number: int,
    change: Callable[[str], object],
    *,
    holder: str | None = None,
) -> str:
    """A session on the generation before, and its upper published as layer ``g<number>``."""
    parent = f"g{number - 1}" if number > 1 else None
    session, layer = f"s{number}", f"g{number}"
    fixture.session(session, parent)
    fixture.write(session, store.compose(fixture.rootfs, parent), change)
    store.publish(session, layer=layer, parent=parent, image="base", holder=holder)
    return layer


def base(fixture: Fixture) -> None:
    for name in (
        "keep/a",
        "keep/b",
        "opaque/old",
        "gone/file",
        "file",
        "tofile/x",
        "todir",
        "mv/one",
        "mv/sub/two",
    ):
        write(str(fixture.image), name)


def first(root: str) -> None:
    write(root, "new/inner/a")
    write(root, "keep/b", "changed")
    shutil.rmtree(f"{root}/opaque")
    write(root, "opaque/fresh")
    shutil.rmtree(f"{root}/gone")
    os.unlink(f"{root}/file")
    write(root, "only-here")
    write(root, "linked")
    os.link(f"{root}/linked", f"{root}/keep/linked-too")
    os.setxattr(f"{root}/keep", "user.first", b"1")


def second(root: str) -> None:
    os.unlink(f"{root}/only-here")
    os.unlink(f"{root}/keep/a")
    write(root, "opaque/more")
    os.mkdir(f"{root}/gone")
    write(root, "file", "again")
    shutil.rmtree(f"{root}/tofile")
    write(root, "tofile")
    os.unlink(f"{root}/todir")
    write(root, "todir/now")
    os.chmod(f"{root}/keep", 0o750)
    os.chown(f"{root}/new", 1000, 1001)
    os.setxattr(f"{root}/keep/b", "user.second", b"2")
    os.setxattr(f"{root}/keep", "user.second", b"2")


def renames(root: str) -> None:
    os.rename(f"{root}/mv", f"{root}/moved")
    write(root, "mv/unrelated")
    os.rename(f"{root}/moved/sub", f"{root}/new/sub")
    write(root, "new/sub/added")


def third(root: str) -> None:
    shutil.rmtree(f"{root}/opaque")
    os.unlink(f"{root}/file")
    write(root, "new/inner/b")
    os.unlink(f"{root}/new/inner/a")
    shutil.rmtree(f"{root}/todir")


def rename_again(root: str) -> None:
    os.rename(f"{root}/moved", f"{root}/keep/moved-twice")
    os.unlink(f"{root}/keep/moved-twice/one")
    os.rename(f"{root}/new", f"{root}/newer")


def collected(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect as if the grace for replaced directories were over."""
    monkeypatch.setattr(store_module, "RETIRED_GRACE_MS", -1)
    return store.collect()


@needs_root
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_folded_chain_shows_the_same_tree(
    fixture: Fixture, store: LayerStore, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Whiteouts, opaque directories, redirects twice over, hard links, attributes, changes of kind."""
    base(fixture)
    for number, change in enumerate((first, second, renames, third, rename_again), 1):
        generation(fixture, store, number, change)
    store.hold("g5", "snap")
    before = fixture.view(store.compose(fixture.rootfs, "g5"))
    assert os.getxattr(fixture.data / "layers/g3/fs/root/moved", "trusted.overlay.redirect")
    folded = store.fold("g5", rootfs=fixture.rootfs, count=count)
    assert folded.depth == 6 - count
    assert folded.synced_ms is not None
    assert fixture.view(store.compose(fixture.rootfs, "g5")) == before
    gone = [f"g{number}" for number in range(6 - count, 5)]
    assert collected(store, monkeypatch) == gone
    assert fixture.view(store.compose(fixture.rootfs, "g5")) == before
    assert sorted(os.listdir(fixture.data / "layers/g5")) == sorted(
        [folded.directory, "meta.copy.json", "meta.json", "refs"]
    )


@needs_root
def test_whiteouts_that_hide_nothing_are_dropped(fixture: Fixture, store: LayerStore) -> None:
    """Kept, one would be listed as a ghost in a directory that merges with nothing."""
    base(fixture)
    generation(fixture, store, 1, first)

    def unlink(root: str) -> None:
        os.unlink(f"{root}/only-here")
        os.unlink(f"{root}/new/inner/a")

    generation(fixture, store, 2, unlink)
    folded = store.fold("g2", rootfs=fixture.rootfs)
    root = fixture.data / "layers/g2" / folded.directory / "root"
    assert not os.path.lexists(root / "only-here")
    assert os.listdir(root / "new/inner") == []
    assert os.path.lexists(root / "file"), "this one hides a file of the image"


def _random_chain(fixture: Fixture, store: LayerStore, seed: int) -> None:
    rng = random.Random(seed)
    plant(str(fixture.image), rng)
    for number in range(1, 7):
        generation(fixture, store, number, lambda root: shake(root, rng, 15))
    store.hold("g6", "snap")
    before = fixture.view(store.compose(fixture.rootfs, "g6"))
    for layer, count in (("g3", 2), ("g6", rng.randint(2, 4))):
        store.fold(layer, rootfs=fixture.rootfs, count=count)
        assert fixture.view(store.compose(fixture.rootfs, "g6")) == before, f"seed {seed}, {layer} by {count}"
    store.collect()
    store.fold("g6", rootfs=fixture.rootfs, count=store.get("g6").depth)
    assert fixture.view(store.compose(fixture.rootfs, "g6")) == before, f"seed {seed}, folded into one"


@needs_root
@pytest.mark.parametrize("seed", [*range(10), 202, 392])
def test_random_generations_fold_to_the_same_tree(fixture: Fixture, store: LayerStore, seed: int) -> None:
    _random_chain(fixture, store, seed)


def test_random_generations_fold_in_an_unprivileged_user_namespace(memory: Path) -> None:
    memory.chmod(0o777)

    def scenario() -> None:
        for seed in range(4):
            fixture = Fixture(memory / f"data{seed}", flavour="user")
            _random_chain(fixture, LayerStore(str(fixture.data), flavour="user"), seed)

    run_forked(scenario, user_namespace=True)


@needs_root
def test_a_grafted_image_folds_to_the_same_tree(fixture: Fixture, store: LayerStore) -> None:
    """The image itself redirects into a lower of its own, and a session renames what was grafted."""
    host = fixture.data / "host"
    write(str(host), "lib/python/module")
    write(str(host), "share/doc")
    (fixture.image / "usr/lib").mkdir(parents=True)
    os.setxattr(fixture.image / "usr/lib", "trusted.overlay.redirect", b"/lib")
    lowers = (Lower(str(fixture.image)), Lower(str(host), store=False))
    rootfs = Rootfs("base", "trusted", (Slot("root", "/", lowers),))

    def generation(number: int, change: Callable[[str], object]) -> None:
        parent = f"g{number - 1}" if number > 1 else None
        fixture.session(f"s{number}", parent)
        fixture.write(f"s{number}", store.compose(rootfs, parent), change)
        store.publish(f"s{number}", layer=f"g{number}", parent=parent, image="base")

    generation(1, lambda root: os.rename(f"{root}/usr/lib/python", f"{root}/usr/python"))
    generation(2, lambda root: write(root, "usr/python/added"))
    generation(3, lambda root: os.rename(f"{root}/usr/python", f"{root}/python"))
    before = fixture.view(store.compose(rootfs, "g3"))
    assert {"python/module", "python/added"} <= set(before)
    store.fold("g3", rootfs=rootfs, count=3)
    assert fixture.view(store.compose(rootfs, "g3")) == before


@needs_root
def test_folding_bounds_a_chain_however_it_is_held(fixture: Fixture, store: LayerStore) -> None:
    """Every generation is a snapshot of its own and keeps showing what it did."""
    base(fixture)
    views: dict[str, dict[str, Any]] = {}
    for number in range(1, 16):

        def change(root: str, number: int = number) -> None:
            write(root, f"keep/{number}")
            write(root, "keep/b", str(number))

        layer = generation(fixture, store, number, change, holder=f"snap{number}")
        views[layer] = fixture.view(store.compose(fixture.rootfs, layer))
        assert store.fold_to_depth(layer, rootfs=fixture.rootfs, max_depth=6).depth <= 6
    assert store.collect() == []
    for layer, view in views.items():
        assert fixture.view(store.compose(fixture.rootfs, layer)) == view


@needs_root
def test_a_session_on_a_layer_being_folded_is_undisturbed(
    fixture: Fixture, store: LayerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    base(fixture)
    for number, change in enumerate((first, second, third), 1):
        generation(fixture, store, number, change)
    directory = fixture.session("running", "g3")
    lowers = [lower.path for lower in store.compose(fixture.rootfs, "g3").slots[0].lowers]
    with (
        locked(directory / "lock"),
        mounted(lowers, str(directory / "fs/root"), str(directory / "work/root")) as root,
    ):
        before = fixture.view(store.compose(fixture.rootfs, "g3"))
        store.fold("g3", rootfs=fixture.rootfs, count=3)
        assert collected(store, monkeypatch) == []
        assert Path(root, "todir").exists() is False
        assert Path(root, "new/inner/b").read_text() == "new/inner/b"
        write(root, "keep/b", "copied up")
        assert all(os.path.isdir(lower) for lower in lowers)
    store.publish("running", layer="g4", parent="g3", image="base", holder="snap")
    assert collected(store, monkeypatch) == ["g1", "g2"]
    after = fixture.view(store.compose(fixture.rootfs, "g4"))
    assert after.keys() == before.keys()
    assert after["keep/b"] != before["keep/b"]


@needs_root
def test_a_replaced_directory_stays_for_whoever_composed_it(fixture: Fixture, store: LayerStore) -> None:
    """Between composing and its spec being written a session is on no record."""
    generation(fixture, store, 1, first_of_two)
    generation(fixture, store, 2, lambda root: write(root, "two"), holder="snap")
    lowers = [lower.path for lower in store.compose(fixture.rootfs, "g2").slots[0].lowers]
    store.fold("g2", rootfs=fixture.rootfs)
    assert store.collect() == []
    assert all(os.path.isdir(lower) for lower in lowers)


def first_of_two(root: str) -> None:
    write(root, "one")


@needs_root
def test_a_fold_killed_at_any_step_leaves_the_old_chain_or_the_new(memory: Path) -> None:
    step, killed, folded = 0, True, 0
    while killed:
        step += 1
        fixture = Fixture(memory / f"{step}")
        store = LayerStore(str(fixture.data), flavour="trusted")
        base(fixture)
        generation(fixture, store, 1, first)
        generation(fixture, store, 2, second, holder="snap")
        before = fixture.view(store.compose(fixture.rootfs, "g2"))
        killed = _killed_at(step, partial(store.fold, "g2", rootfs=fixture.rootfs))
        assert fixture.view(store.compose(fixture.rootfs, "g2")) == before
        folded += killed and store.get("g2").depth == 1
        assert store.recover().damaged == ()
        assert fixture.view(store.compose(fixture.rootfs, "g2")) == before
        assert store.holders("g2") == ("snap",)
        hidden = [name for name in os.listdir(fixture.data / "layers") if name.startswith(".")]
        assert sorted(hidden) == [".lock", ".lock-fold"]
    assert step > 20
    assert folded, "one of the deaths came after the switch"


def _killed_at(step: int, action: Callable[[], object]) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            count = 0
            for name in ("rename", "mkdir", "link", "unlink", "rmdir", "fsync"):
                original = getattr(os, name)

                def dying(
                    *args: object, _original: Callable[..., object] = original, **kwargs: object
                ) -> object:
                    nonlocal count
                    count += 1
                    if count == step:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return _original(*args, **kwargs)

                setattr(os, name, dying)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    _, code = os.waitpid(pid, 0)
    assert code in (0, signal.SIGKILL), f"unexpected end {code}"
    return code == signal.SIGKILL


@needs_root
def test_a_fold_of_too_little_is_refused(fixture: Fixture, store: LayerStore) -> None:
    generation(fixture, store, 1, first_of_two)
    with pytest.raises(InvalidRequest):
        store.fold("g1", rootfs=fixture.rootfs)
    with pytest.raises(InvalidRequest):
        store.fold("g1", rootfs=fixture.rootfs, count=1)
    with pytest.raises(LayerError):
        store.fold("lost", rootfs=fixture.rootfs)


@needs_root
def test_more_whiteouts_than_an_inode_can_have_names_still_fold(tmp_path: Path) -> None:
    """The kernel links whiteouts together up to the file system's limit; a fold cannot add to those."""
    probe = tmp_path / "probe"
    probe.touch()
    limit = os.pathconf(probe, "PC_LINK_MAX")
    if not 1000 <= limit <= 1 << 17:
        pytest.skip(
            f"the file system under {tmp_path} allows {limit} links: too many, or no such limit, to try"
        )
    data = Fixture(tmp_path / "data")
    store = LayerStore(str(data.data), flavour="trusted")
    (data.image / "hidden").touch()
    upper = data.session("s1") / "fs/root"
    os.mknod(upper / "hidden", stat.S_IFCHR, 0)
    spare = tmp_path / "spare"
    spare.mkdir()
    for number in range(limit - 1):
        os.link(upper / "hidden", spare / str(number))
    store.publish("s1", layer="g1", parent=None, image="base")
    data.session("s2", "g1")
    store.publish("s2", layer="g2", parent="g1", image="base")
    folded = store.fold("g2", rootfs=data.rootfs)
    kept = os.lstat(data.data / "layers/g2" / folded.directory / "root/hidden")
    assert stat.S_ISCHR(kept.st_mode)
    assert kept.st_nlink == 1
    remove_tree(str(spare))
