"""Random sequences of operations against a model of the contract, on real sandboxes.

The model is what a user is promised: a sandbox has files; stopping a persistent one keeps them; a snapshot is
those files for ever; resuming, forking and rolling back start from a snapshot; a restart changes nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from sandkeep.errors import NotFound, SessionStopped
from sandkeep.spec import SnapshotSource
from sandkeep.store.rows import ACTIVE, TERMINAL
from tests.engine.engine_lab import EngineLab

FILES = st.sampled_from(("a", "b", "c"))
_names = itertools.count(1)


@dataclass
class Model:
    """What must be true of one sandbox."""

    name: str
    persistent: bool
    session: str
    running: bool = True
    files: dict[str, str] = field(default_factory=dict)
    base: dict[str, str] = field(default_factory=dict)
    """What the next session starts with."""
    current: str | None = None


class Contract(RuleBasedStateMachine):
    sandboxes = Bundle("sandboxes")
    snapshots = Bundle("snapshots")

    lab: EngineLab
    """Shared by all sequences; each leaves it without sandboxes."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[str, Model] = {}
        self.kept: dict[str, dict[str, str]] = {}

    def teardown(self) -> None:
        for name in self.alive:
            self.lab.do(self.lab.engine.sandboxes.destroy(self.lab.project, name))

    # --- what can happen ---------------------------------------------------------------------------------

    @rule(target=sandboxes, persistent=st.booleans())
    def create(self, persistent: bool) -> str:
        name = f"m{next(_names)}"
        started = self.lab.create(name, persistent=persistent)
        self.alive[name] = Model(name, persistent, started.session.id)
        return name

    @rule(target=sandboxes, snapshot=snapshots)
    def create_from(self, snapshot: str) -> str:
        name = f"m{next(_names)}"
        started = self.lab.create(name, source=SnapshotSource(snapshot))
        files = dict(self.kept[snapshot])
        self.alive[name] = Model(
            name, True, started.session.id, files=dict(files), base=files, current=snapshot
        )
        return name

    @rule(name=sandboxes, file=FILES, text=st.text(alphabet="xyz", max_size=3))
    def write(self, name: str, file: str, text: str) -> None:
        model = self.alive.get(name)
        if model is None:
            return
        script = f"printf %s '{text}' > {file}"
        if not model.running:
            with pytest.raises(SessionStopped):
                self.lab.sh(model.session, script)
            return
        self.lab.sh(model.session, script)
        model.files[file] = text

    @rule(target=snapshots, name=sandboxes)
    def stop(self, name: str) -> object:
        model = self.alive.get(name)
        if model is None:
            return multiple()
        was_running = model.running
        ended, snapshot = self.lab.do(self.lab.engine.sessions.stop(self.lab.project, model.session))
        assert ended.status in TERMINAL
        model.running = False
        if not was_running:
            return multiple()
        assert (snapshot is not None) == model.persistent
        if snapshot is None:
            return multiple()
        return self._keep(model, snapshot.id)

    @rule(target=snapshots, name=sandboxes)
    def snapshot(self, name: str) -> object:
        model = self.alive.get(name)
        if model is None:
            return multiple()
        taking = self.lab.engine.sessions.snapshot(self.lab.project, model.session)
        if not model.running:
            with pytest.raises(SessionStopped):
                self.lab.do(taking)
            return multiple()
        _, snapshot = self.lab.do(taking)
        model.running = False
        return self._keep(model, snapshot.id)

    def _keep(self, model: Model, snapshot: str) -> str:
        self.kept[snapshot] = dict(model.files)
        model.base, model.current = dict(model.files), snapshot
        return snapshot

    @rule(target=snapshots, name=sandboxes)
    def checkpoint(self, name: str) -> object:
        model = self.alive.get(name)
        if model is None or not model.running:
            return multiple()
        _, snapshot = self.lab.do(self.lab.engine.sessions.checkpoint(self.lab.project, model.session))
        self.kept[snapshot.id] = dict(model.files)
        return snapshot.id

    @rule(name=sandboxes)
    def resume(self, name: str) -> None:
        model = self.alive.get(name)
        if model is None:
            with pytest.raises(NotFound):
                self.lab.do(self.lab.engine.sandboxes.resume(self.lab.project, name))
            return
        started = self.lab.do(self.lab.engine.sandboxes.resume(self.lab.project, name))
        assert started.resumed == (not model.running)
        if not model.running:
            model.running, model.session = True, started.session.id
            model.files = dict(model.base)

    @rule(name=sandboxes, snapshot=snapshots)
    def roll_back(self, name: str, snapshot: str) -> None:
        model = self.alive.get(name)
        if model is None:
            return
        updating = self.lab.engine.sandboxes.update(self.lab.project, name, {}, current_snapshot=snapshot)
        self.lab.do(updating)
        model.base, model.current = dict(self.kept[snapshot]), snapshot

    @rule(target=sandboxes, name=sandboxes)
    def fork(self, name: str) -> object:
        model = self.alive.get(name)
        if model is None:
            return multiple()
        fresh = f"m{next(_names)}"
        forking = self.lab.engine.sandboxes.fork(self.lab.project, name, {"name": fresh, "mounts": {}})
        started = self.lab.do(forking)
        self.alive[fresh] = Model(
            fresh,
            model.persistent,
            started.session.id,
            files=dict(model.base),
            base=dict(model.base),
            current=model.current,
        )
        return fresh

    @rule(name=consumes(sandboxes))
    def destroy(self, name: str) -> None:
        if self.alive.pop(name, None) is not None:
            self.lab.do(self.lab.engine.sandboxes.destroy(self.lab.project, name))

    @rule()
    def restart(self) -> None:
        self.lab.reopen()

    # --- what must hold ----------------------------------------------------------------------------------

    @invariant()
    def every_sandbox_is_as_promised(self) -> None:
        for model in self.alive.values():
            found = self.lab.engine.sandboxes.get(self.lab.project, model.name)
            assert found.session.id == model.session
            assert (found.session.status in ACTIVE) == model.running
            assert found.sandbox.current_snapshot == model.current
            if model.running:
                script = "for f in a b c; do [ -e $f ] && printf '%s=%s\\n' $f \"$(cat $f)\"; done; true"
                lines = self.lab.sh(model.session, script).splitlines()
                assert dict(line.split("=", 1) for line in lines) == model.files


def test_random_operations_keep_the_contract(tmp_path: Path) -> None:
    with EngineLab(str(tmp_path / "data")) as lab:
        Contract.lab = lab
        run_state_machine_as_test(
            Contract,
            settings=settings(
                max_examples=8,
                stateful_step_count=15,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
