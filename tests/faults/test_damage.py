"""One damaged file: the server starts, other sandboxes do not notice, the damaged one says so and can go.

Each case is a file of the sandbox ``victim`` and what happens to it, while the server is away. The sandbox
has stopped twice, so that it stands on two layers, and runs in some cases.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandkeep.engine.sandboxes import Started
from sandkeep.engine.settings import Settings
from sandkeep.errors import LayerError
from sandkeep.host.layers.tree import remove_tree
from tests.driver_lab import Lab
from tests.engine.engine_lab import EngineLab
from tests.mode_runner import MODES, Ask, everywhere, opened


@pytest.fixture(scope="module", params=[mode for mode in MODES if mode != "single"])
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


# --- what can happen to a file -----------------------------------------------------------------------------


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xffgarbage\x80" * 20)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def missing(path: Path) -> None:
    path.unlink()


_NUMBERS = itertools.count()
HAPPENS = (garbage, emptied, flipped, cut, missing)


@dataclass
class Scene:
    """A data directory with a victim and a bystander, as a server left it."""

    data: Path
    session: str
    """The victim's current one."""
    bottom: str
    top: str
    """Its layers."""

    @property
    def directory(self) -> Path:
        return self.data / "sessions" / self.session


Spoil = Callable[[Scene], None]


@dataclass(frozen=True)
class Case:
    spoil: Spoil
    running: bool = False
    saved: bool = True
    """Whether the victim's files are all there afterwards; if not, it says so."""


def record_of_layer(happens: Callable[[Path], None], layer: str, *, copies: bool) -> Spoil:
    def spoil(scene: Scene) -> None:
        directory = scene.data / "layers" / getattr(scene, layer)
        happens(directory / "meta.json")
        if copies:
            happens(directory / "meta.copy.json")

    return spoil


def file_of_session(happens: Callable[[Path], None], name: str) -> Spoil:
    return lambda scene: happens(scene.directory / name)


def stray_file(place: str) -> Spoil:
    return lambda scene: garbage(scene.data / place / "README")


def stray_directory(place: str) -> Spoil:
    return lambda scene: (scene.data / place / "lost+found").mkdir(exist_ok=True)


def torn_publish(scene: Scene) -> None:
    directory = scene.data / "layers" / ".new-lay_torn"
    directory.mkdir()
    (directory / "meta.json").touch()


def layer_gone(layer: str) -> Spoil:
    return lambda scene: taken(scene, getattr(scene, layer))


def files_gone(layer: str) -> Spoil:
    return lambda scene: taken(scene, f"{getattr(scene, layer)}/fs")


def taken(scene: Scene, path: str) -> None:
    """Moved out of sight: an ordinary user cannot remove what belongs to a sandbox's ids."""
    os.rename(scene.data / "layers" / path, scene.data / f"taken-{next(_NUMBERS)}")


def references_gone(scene: Scene) -> None:
    remove_tree(str(scene.data / "layers" / scene.top / "refs"))


def processes_spoilt(scene: Scene) -> None:
    for record in scene.directory.glob("processes/*/record.jsonl"):
        garbage(record)


CASES: dict[str, Case] = {
    **{
        f"{layer}_record_{happens.__name__}{'_with_its_copy' if copies else ''}": Case(
            record_of_layer(happens, layer, copies=copies)
        )
        for layer in ("top", "bottom")
        for happens in HAPPENS
        for copies in (False, True)
    },
    **{
        f"{name}_{happens.__name__}_of_a_{'running' if running else 'stopped'}_session": Case(
            file_of_session(happens, f"{name}.json"), running=running
        )
        for name in ("spec", "state")
        for happens in HAPPENS
        for running in (True, False)
    },
    "a_file_among_layers": Case(stray_file("layers")),
    "a_file_among_sessions": Case(stray_file("sessions")),
    "a_directory_among_layers": Case(stray_directory("layers")),
    "a_directory_among_sessions": Case(stray_directory("sessions")),
    "a_torn_publish": Case(torn_publish),
    "references_gone": Case(references_gone),
    "records_of_processes_garbage": Case(processes_spoilt, running=False),
    "top_layer_gone": Case(layer_gone("top"), saved=False),
    "bottom_layer_gone": Case(layer_gone("bottom"), saved=False),
    "bottom_layer_gone_under_a_running_session": Case(layer_gone("bottom"), running=True, saved=False),
    "files_of_the_top_layer_gone": Case(files_gone("top"), saved=False),
    "files_of_the_bottom_layer_gone": Case(files_gone("bottom"), saved=False),
}


# --- the play ----------------------------------------------------------------------------------------------


class Here(EngineLab):
    def __init__(self, data_dir: str) -> None:
        super().__init__(data_dir, Settings(pool=0))

    def __enter__(self) -> Here:
        return self

    def away(self) -> None:
        self.do(self.engine.close())

    def back(self) -> None:
        self.engine = self.do(self._open())

    def stop(self, started: Started) -> None:
        self.do(self.engine.sessions.stop(self.project, started.session.id))

    def resume(self, name: str) -> Started:
        return self.do(self.engine.sandboxes.resume(self.project, name))


def play(lab: Lab, case: Case) -> None:
    data_dir = f"{lab.driver.data_dir}-damage"
    with Here(data_dir) as here:
        bystander = here.create("bystander")
        here.sh(bystander.session.id, "echo mine > file")
        here.stop(bystander)
        runs = here.create("runs")
        scene = make_victim(here, running=case.running)
        here.away()
        case.spoil(scene)
        here.back()
        others_do_not_notice(here, runs)
        if case.saved:
            assert here.engine.damage.of(here.engine.store.sandboxes.get(here.project, "victim")) is None
            works(here)
        else:
            is_damaged(here, scene)
        here.do(here.engine.sandboxes.destroy(here.project, "victim", delete_orphan_snapshots=True))
        here.away()
        here.back()
        assert not scene.directory.exists()
        left = {scene.top, scene.bottom} & set(os.listdir(scene.data / "layers"))
        assert not left, left
        others_do_not_notice(here, runs)


def make_victim(here: Here, *, running: bool) -> Scene:
    started = here.create("victim")
    layers = []
    for number in (1, 2):
        here.sh(started.session.id, f"echo {number} > file{number}")
        here.stop(started)
        layers.append(f"lay_{started.session.id[4:]}")
        if number == 1 or running:
            started = here.resume("victim")
    if running:
        here.sh(started.session.id, "echo 3 > file3")
    return Scene(Path(here.data_dir), started.session.id, layers[0], layers[1])


def others_do_not_notice(here: Here, runs: Started) -> None:
    assert here.sh(runs.session.id, "echo here") == "here\n"
    started = here.resume("bystander")
    assert here.sh(started.session.id, "cat file") == "mine\n"
    here.stop(started)


def works(here: Here) -> None:
    started = here.resume("victim")
    assert here.sh(started.session.id, "cat file1 file2") == "1\n2\n"
    here.stop(started)


def is_damaged(here: Here, scene: Scene) -> None:
    """It is named, wherever somebody looks, and goes back to what is intact only when asked to."""
    sandbox = here.engine.store.sandboxes.get(here.project, "victim")
    found = here.engine.damage.of(sandbox)
    assert found is not None and found.layer in (scene.top, scene.bottom)
    events = here.engine.store.events.page(here.project, kind="sandbox.damaged").items
    assert {event.sandbox_name for event in events} == {"victim"}
    if sandbox.status != "running":
        with pytest.raises(LayerError) as caught:
            here.resume("victim")
        assert caught.value.layer == found.layer and "sandkeep repair" in str(caught.value.hint)
    report = here.do(here.engine.repairs.repair(here.project))
    [left] = report.left
    assert (left.sandbox, left.layer) == ("victim", found.layer)
    intact = found.layer == scene.top
    assert (left.older is not None) == intact
    if intact:
        report = here.do(here.engine.repairs.repair(here.project, "victim", use_older=True, drop=True))
        assert not report.left and len(report.done) == 2
        started = here.resume("victim")
        assert here.sh(started.session.id, "cat file1; test ! -e file2") == "1\n"


def _make(name: str) -> Callable[[Ask], None]:
    def body(lab: Lab) -> None:
        play(lab, CASES[name])

    body.__name__ = body.__qualname__ = f"test_{name}"
    body.__module__ = __name__
    return everywhere(body)


for _name in CASES:
    _test = _make(_name)
    globals()[_test.__name__] = _test
