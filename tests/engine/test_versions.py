"""A session whose supervisor is of another version: the others go on, and it can be stopped and destroyed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandkeep.engine.settings import Settings
from sandkeep.errors import HostCannot
from sandkeep.host.driver import Acting
from sandkeep.process_options import ProcessOptions
from sandkeep.shared import protocol
from sandkeep.shared.sealed import read_sealed, write_sealed
from sandkeep.store.rows import SessionStatus
from tests.engine.engine_lab import EngineLab


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLab]:
    with EngineLab(str(tmp_path_factory.mktemp("versions")), Settings(pool=0)) as lab:
        yield lab


@pytest.mark.parametrize("spoken", [protocol.OLDEST - 1, protocol.PROTOCOL + 1], ids=["too old", "too new"])
def test_it_is_refused_alone_and_ends_with_its_files_kept(lab: EngineLab, spoken: int) -> None:
    other, strange, doomed = (lab.create(name).session.id for name in ("other", "strange", "doomed"))
    lab.sh(strange, "echo kept > file")
    for session in (strange, doomed):
        record = f"{lab.data_dir}/sessions/{session}/state.json"
        write_sealed(record, {**read_sealed(record), "protocol": spoken, "oldest": spoken})
    lab.reopen()
    engine, project = lab.engine, lab.project
    assert lab.sh(other, "echo fine") == "fine\n"
    for work in (
        engine.sandboxes.resume(project, "strange"),
        engine.processes.start(project, strange, ProcessOptions(command="true")),
        engine.files.stat(project, strange, "/", Acting()),
    ):
        with pytest.raises(HostCannot, match=f"protocol {spoken}"):
            lab.do(work)
    told = [event for event in engine.store.events.page(project).items if event.kind == "session.unsupported"]
    assert {event.session for event in told} == {strange, doomed}
    assert all(str(spoken) in event.data["reason"] for event in told)
    assert engine.sessions.get(project, strange).status is SessionStatus.RUNNING
    lab.do(engine.upkeep.turn())
    lab.do(engine.sandboxes.destroy(project, "doomed"))
    ended, snapshot = lab.do(engine.sessions.stop(project, strange))
    assert ended.status is SessionStatus.ABORTED and snapshot is not None
    resumed = lab.do(engine.sandboxes.resume(project, "strange"))
    assert lab.sh(resumed.session.id, "cat file") == "kept\n"
