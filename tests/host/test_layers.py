"""The layer store: publishing, chains, references, deletion, recovery."""

from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from sandkeep.errors import InvalidRequest, LayerError, NotFound, WrongState
from sandkeep.host.layers import LayerStore
from sandkeep.host.layers.tree import disk_usage, remove_tree
from sandkeep.host.rootfs import Lower, Rootfs, Slot
from tests.host.overlay_mounts import Fixture, for_anybody, locked, mounted, needs_root, run_forked


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path / "data")


@pytest.fixture
def memory() -> Iterator[Path]:
    """Many small files: kept in memory."""
    directory = Path(tempfile.mkdtemp(prefix="sandkeep-layers-", dir="/dev/shm"))
    yield directory
    remove_tree(str(directory))


@pytest.fixture
def store(fixture: Fixture) -> LayerStore:
    return LayerStore(str(fixture.data), flavour="trusted")


def publish(
    fixture: Fixture, store: LayerStore, layer: str, parent: str | None = None, *, holder: str | None = None
) -> None:
    upper = fixture.session(f"s-{layer}", parent) / "fs/root"
    (upper / f"from-{layer}").write_text(layer)
    store.publish(f"s-{layer}", layer=layer, parent=parent, image="base", holder=holder)


# --- publishing ----------------------------------------------------------------------------------------


def test_publish_moves_the_upper_and_the_chain_lists_it_topmost_first(
    fixture: Fixture, store: LayerStore
) -> None:
    publish(fixture, store, "one")
    publish(fixture, store, "two", "one")
    assert [(layer.id, layer.depth, layer.slots) for layer in store.chain("two")] == [
        ("two", 2, ("root",)),
        ("one", 1, ("root",)),
    ]
    assert not (fixture.data / "sessions/s-two/fs").exists()
    assert (fixture.data / "layers/two/fs/root/from-two").read_text() == "two"
    assert {layer.id for layer in store.list()} == {"one", "two"}


def test_publishing_again_returns_the_same_layer_and_refuses_another(
    fixture: Fixture, store: LayerStore
) -> None:
    publish(fixture, store, "one")
    again = store.publish("s-one", layer="one", parent=None, image="base")
    assert again == store.get("one")
    with pytest.raises(WrongState):
        store.publish("s-one", layer="one", parent=None, image="another")


def test_publish_without_upper_or_parent_is_refused(fixture: Fixture, store: LayerStore) -> None:
    with pytest.raises(NotFound):
        store.publish("nobody", layer="one", parent=None, image="base")
    fixture.session("s")
    with pytest.raises(LayerError, match="lost"):
        store.publish("s", layer="one", parent="lost", image="base")
    for bad in ("../x", ".new-x", "", "a/b"):
        with pytest.raises(InvalidRequest):
            store.publish("s", layer=bad, parent=None, image="base")


@needs_root
def test_publish_works_while_the_overlay_is_still_mounted(fixture: Fixture, store: LayerStore) -> None:
    directory = fixture.session("s")
    with mounted([str(fixture.image)], str(directory / "fs/root"), str(directory / "work/root")) as root:
        Path(root, "file").write_text("kept")
        store.publish("s", layer="one", parent=None, image="base")
    assert (fixture.data / "layers/one/fs/root/file").read_text() == "kept"


def _dies_at(step: int, names: tuple[str, ...]) -> Callable[[], None]:
    """Make the process kill itself just before the given call among those a publish makes."""

    def arm() -> None:
        count = [0]
        for name in names:
            original = getattr(os, name)

            def dying(*args: object, _original: Callable[..., object] = original, **kwargs: object) -> object:
                count[0] += 1
                if count[0] == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return _original(*args, **kwargs)

            setattr(os, name, dying)

    return arm


def _killed_at(step: int, names: tuple[str, ...], action: Callable[[], object]) -> bool:
    """Whether the forked action was killed; the alternative is that it had fewer steps."""
    pid = os.fork()
    if pid == 0:
        try:
            _dies_at(step, names)()
            action()
            os._exit(0)
        finally:
            os._exit(1)
    _, code = os.waitpid(pid, 0)
    assert code in (0, signal.SIGKILL), f"unexpected end {code}"
    return code == signal.SIGKILL


_STEPS = ("rename", "makedirs", "open")


@pytest.mark.parametrize("recover_first", [False, True])
def test_a_publish_killed_at_any_step_loses_nothing(tmp_path: Path, recover_first: bool) -> None:
    """kill -9 before each call that changes the disk; then either repeat, or recover and repeat if needed."""
    step, killed = 0, True
    while killed:
        step += 1
        fixture = Fixture(tmp_path / f"{step}")
        store = LayerStore(str(fixture.data), flavour="trusted")
        (fixture.session("s") / "fs/root/file").write_text("kept")

        def act(store: LayerStore = store) -> object:
            return store.publish("s", layer="one", parent=None, image="base", holder="snap")

        killed = _killed_at(step, _STEPS, act)
        if recover_first:
            found = store.recover()
            done = [layer.id for layer in store.list()]
            assert (found.lost == ("s",)) is (done == [])
            assert not [n for n in os.listdir(fixture.data / "layers") if n.startswith((".new", ".del"))]
        act()
        assert (fixture.data / "layers/one/fs/root/file").read_text() == "kept"
        assert store.holders("one") == ("snap",)
        assert store.recover().lost == ()
    assert step > 5


def test_adopt_killed_at_any_step_can_be_repeated(tmp_path: Path) -> None:
    step, killed = 0, True
    while killed:
        step += 1
        fixture = Fixture(tmp_path / f"{step}")
        store = LayerStore(str(fixture.data), flavour="trusted")
        copy = Path(store.copy_directory("one"))
        (copy / "root").mkdir(parents=True)
        (copy / "root/file").write_text("kept")

        def act(store: LayerStore = store) -> object:
            return store.adopt(layer="one", parent=None, image="base", holder="snap")

        killed = _killed_at(step, _STEPS, act)
        act()
        assert (fixture.data / "layers/one/fs/root/file").read_text() == "kept"
        assert store.holders("one") == ("snap",)
    assert step > 4


def test_recovery_finishes_or_forgets_a_torn_adopt(tmp_path: Path) -> None:
    """Whether the adopt had reached its record decides; nothing in between is left."""
    step, killed, finished = 0, True, 0
    while killed:
        step += 1
        fixture = Fixture(tmp_path / f"{step}")
        store = LayerStore(str(fixture.data), flavour="trusted")
        (Path(store.copy_directory("one")) / "root").mkdir(parents=True)
        adopt = partial(store.adopt, layer="one", parent=None, image="base", holder="snap")
        killed = _killed_at(step, _STEPS, adopt)
        found = store.recover()
        left = sorted(name for name in os.listdir(fixture.data / "layers") if not name.startswith(".lock"))
        assert left == ([] if killed and not found.finished else ["one"])
        finished += bool(found.finished)
    assert finished


# --- composing -----------------------------------------------------------------------------------------


def test_compose_puts_the_chain_on_each_slot_that_has_it(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "one")
    upper = fixture.session("s", "one") / "fs"
    (upper / "usr").mkdir()
    store.publish("s", layer="two", parent="one", image="base")
    image = Rootfs(
        "base",
        "trusted",
        (Slot("root", "/", (Lower("/i/root"),)), Slot("usr", "/usr", (Lower("/usr", store=False),))),
    )
    composed = store.compose(image, "two")
    layers = str(fixture.data / "layers")
    assert [[low.path for low in slot.lowers] for slot in composed.slots] == [
        [f"{layers}/two/fs/root", f"{layers}/one/fs/root", "/i/root"],
        [f"{layers}/two/fs/usr", "/usr"],
    ]
    assert store.compose(image, None) == image
    with pytest.raises(LayerError, match="no slot usr"):
        store.compose(fixture.rootfs, "two")


def test_compose_refuses_another_flavour(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "one")
    rootless = LayerStore(str(fixture.data), flavour="user")
    with pytest.raises(LayerError, match="flavour"):
        rootless.compose(fixture.rootfs, None)
    with pytest.raises(LayerError, match="layer one is of flavour trusted"):
        rootless.compose(Rootfs("base", "user", fixture.rootfs.slots), "one")


def test_a_missing_layer_below_is_named(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "one")
    publish(fixture, store, "two", "one")
    remove_tree(str(fixture.data / "layers/one"))
    with pytest.raises(LayerError, match="layer one, which two stands on, is missing") as caught:
        store.chain("two")
    assert caught.value.layer == "one"


# --- references and deletion ---------------------------------------------------------------------------


def test_collect_keeps_what_holders_children_and_sessions_need(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "a")
    publish(fixture, store, "b", "a", holder="snap-b")
    publish(fixture, store, "c")
    publish(fixture, store, "d", "c")
    publish(fixture, store, "e")
    fixture.session("running", "d")
    assert store.collect() == ["e"]
    assert {layer.id for layer in store.list()} == {"a", "b", "c", "d"}
    store.release("b", "snap-b")
    assert store.collect() == ["a", "b"]
    store.discard("running")
    assert store.collect() == ["c", "d"]
    assert os.listdir(fixture.data / "layers") == [".lock"]


def test_a_session_needs_its_layer_until_its_lock_is_free_and_its_upper_gone(
    fixture: Fixture, store: LayerStore
) -> None:
    publish(fixture, store, "a")
    directory = fixture.session("s", "a")
    assert store.collect() == [], "the upper of a dead session still needs its layer"
    with locked(directory / "lock"):
        store.discard("s")
        assert store.collect() == [], "a live supervisor has it mounted"
    (directory / "lock").unlink()
    assert store.collect() == [], "a session without lock is about to start"
    (directory / "lock").touch()
    assert store.collect() == ["a"]


def test_a_session_needs_what_its_drives_stand_on(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "a")
    publish(fixture, store, "b", "a")
    directory = fixture.session("s")
    drive = {"name": "drive0", "drive": True, "lowers": [[str(fixture.data / "layers/b/fs/root"), True]]}
    (directory / "spec.json").write_text(json.dumps({"layer": None, "rootfs": {"slots": [drive]}}))
    assert store.collect() == []
    store.discard("s")
    assert store.collect() == ["a", "b"]


def test_everything_a_holder_has_is_released_at_once(fixture: Fixture, store: LayerStore) -> None:
    for layer in ("a", "b"):
        publish(fixture, store, layer)
        store.hold(layer, "reader")
    store.hold("b", "other")
    store.release_all("reader")
    assert store.collect() == ["a"]


def test_hold_and_collect_race_never_leaves_a_hold_on_nothing(fixture: Fixture, store: LayerStore) -> None:
    """Each layer is either held and there, or gone and its hold refused."""
    layers = [f"l{number}" for number in range(40)]
    for layer in layers:
        publish(fixture, store, layer)
    refused: list[str] = []

    def holder() -> None:
        for layer in layers:
            try:
                store.hold(layer, "snap")
            except LayerError:
                refused.append(layer)

    def collector() -> None:
        store.collect()

    threads = [threading.Thread(target=target) for target in (holder, collector, collector)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = {layer.id for layer in store.list()}
    assert left | set(refused) == set(layers)
    assert not left & set(refused)
    assert all(store.holders(layer) == ("snap",) for layer in left)


def test_interrupted_deletions_are_finished(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "a")
    os.rename(fixture.data / "layers/a", fixture.data / "layers/.del-a")
    assert store.collect() == []
    assert os.listdir(fixture.data / "layers") == [".lock"]


def test_remove_tree_removes_what_a_sandbox_can_make(memory: Path) -> None:
    """Unreadable directories, far more levels than a path can name, pipes, links to elsewhere."""
    outside = memory / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    top = memory / "top"
    (top / "closed/inner").mkdir(parents=True)
    (top / "closed/inner/file").touch()
    os.mkfifo(top / "pipe")
    os.symlink(outside, top / "link")
    (top / ".deep-1").mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("directory", dir_fd=fd)
        inner = os.open("directory", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    bottom = os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    os.write(bottom, b"x" * 4096)
    os.close(bottom)
    os.close(fd)
    assert disk_usage(str(top)) >= 4096
    (top / "closed/inner").chmod(0)
    (top / "closed").chmod(0)
    remove_tree(str(top))
    assert not top.exists()
    assert (outside / "precious").exists()
    remove_tree(str(top))


def test_a_deep_tree_can_be_removed_by_several_at_once(memory: Path) -> None:
    for _ in range(5):
        top = memory / "top"
        top.mkdir()
        fd = os.open(top, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("directory", dir_fd=fd)
            inner = os.open("directory", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = inner
        os.close(fd)
        with ThreadPoolExecutor(4) as threads:
            for removal in [threads.submit(remove_tree, str(top)) for _ in range(4)]:
                removal.result()
        assert not top.exists()


def test_measure_counts_a_file_with_many_names_once(fixture: Fixture, store: LayerStore) -> None:
    upper = fixture.session("s") / "fs/root"
    (upper / "a").write_bytes(b"x" * 1_000_000)
    os.link(upper / "a", upper / "b")
    store.publish("s", layer="one", parent=None, image="base")
    size = store.measure("one")
    assert 1_000_000 <= size < 1_100_000
    assert store.get("one").size_bytes == size


def test_sync_marks_the_chain(fixture: Fixture, store: LayerStore) -> None:
    publish(fixture, store, "a")
    publish(fixture, store, "b", "a")
    publish(fixture, store, "c", "b")
    assert store.sync("b").synced_ms is not None
    assert store.get("a").synced_ms is not None
    assert store.get("c").synced_ms is None


# --- recovery ------------------------------------------------------------------------------------------


def test_recover_lists_the_sessions_whose_supervisor_is_gone(fixture: Fixture, store: LayerStore) -> None:
    (fixture.session("dead") / "fs/root/file").touch()
    fixture.session("empty")
    alive = fixture.session("alive")
    (alive / "fs/root/file").touch()
    with locked(alive / "lock"):
        assert store.recover().lost == ("dead",)
    assert store.recover().lost == ("alive", "dead")


def test_recover_leaves_a_copy_under_way_and_removes_a_left_one(fixture: Fixture, store: LayerStore) -> None:
    copy = Path(store.copy_directory("one"))
    copy.mkdir()
    (copy / "file").touch()
    with locked(copy):
        store.recover()
        assert (copy / "file").exists()
        with pytest.raises(WrongState, match="still being made"):
            store.adopt(layer="one", parent=None, image="base")
    store.recover()
    assert not copy.exists()


# --- rootless ------------------------------------------------------------------------------------------


def test_the_store_works_in_an_unprivileged_user_namespace(tmp_path: Path) -> None:
    """Publish, compose, whiteouts, deletion, with userxattr and one mapped id."""
    shared = for_anybody(tmp_path / "rootless")

    def scenario() -> None:
        fixture = Fixture(shared / "data", flavour="user")
        store = LayerStore(str(fixture.data), flavour="user")
        (fixture.image / "dir").mkdir()
        (fixture.image / "dir/old").touch()
        (fixture.image / "gone").touch()
        fixture.session("s")

        def change(root: str) -> None:
            remove_tree(f"{root}/dir")
            os.mkdir(f"{root}/dir")
            os.unlink(f"{root}/gone")
            Path(root, "dir/new").touch()

        fixture.write("s", fixture.rootfs, change)
        store.publish("s", layer="one", parent=None, image="base")
        upper = fixture.data / "layers/one/fs/root"
        assert stat.S_ISCHR(os.lstat(upper / "gone").st_mode)
        assert set(fixture.view(store.compose(fixture.rootfs, "one"))) == {"dir", "dir/new"}
        assert store.collect() == ["one"]
        assert not (fixture.data / "layers/one").exists()

    run_forked(scenario, user_namespace=True)
