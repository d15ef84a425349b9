"""What a server whose host has no control groups does with limits, asked for in every way there is.

Arguments: a data directory with a sandbox named ``kept`` that was made with exact limits elsewhere. Prints as
JSON what became of each request, by name: ``{"limits": …}`` of the session that started, or the refusal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandkeep import Resources
from sandkeep import sync as sandkeep
from sandkeep.errors import SandkeepError
from tests.security.restricted import CASES
from tests.server.server_process import PROJECT, TEAM, ServerProcess


def _started(work: Callable[[], sandkeep.Sandbox]) -> dict[str, Any]:
    try:
        box = work()
    except SandkeepError as error:
        return {"refused": type(error).__name__, "message": str(error), "hint": error.hint, **error.details}
    return {"limits": dict(box.current_session.limits), "name": box.name, "exact": box.resources.exact}


def _official(server: ServerProcess, version: str) -> dict[str, Any]:
    """As an official client of the vendor asks."""
    body = {"projectId": PROJECT, "name": f"official-{version}", "resources": {"vcpus": 2, "memory": 4096}}
    with server.client() as client:
        answer = client.post(
            f"/{version}/sandboxes", params={"teamId": TEAM, "projectId": PROJECT}, json=body
        )
    return {"status": answer.status_code, "limits": answer.json().get("session", {}).get("limits")}


def _command(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "sandkeep", *arguments], capture_output=True, text=True, timeout=60
    )
    return {"status": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def main(data: str) -> None:
    CASES["no-control-groups"]()
    server = ServerProcess(Path(data))
    server.start()
    try:
        os.environ["SANDKEEP_URL"] = f"unix://{server.socket}"
        plain = sandkeep.create_sandbox("plain")
        answers = {
            "plain": _started(lambda: plain),
            "create": _started(lambda: sandkeep.create_sandbox(resources=Resources(2))),
            "memory alone": _started(lambda: sandkeep.create_sandbox(resources=Resources(memory_mb=128))),
            "disk alone": _started(lambda: sandkeep.create_sandbox(resources=Resources(disk_mb=128))),
            "processes alone": _started(lambda: sandkeep.create_sandbox(resources=Resources(pids=128))),
            "best effort": _started(lambda: sandkeep.create_sandbox(resources=Resources(4, exact=False))),
            "resume asking": _started(
                lambda: sandkeep.get_or_create_sandbox("plain", resources=Resources(2))
            ),
            "fork": _started(lambda: sandkeep.fork_sandbox("plain", name="forked", resources=Resources(2))),
            "update": _started(lambda: _updated(plain)),
            "resume": _started(lambda: sandkeep.resume_sandbox("kept")),
            "fork of kept": _started(lambda: sandkeep.fork_sandbox("kept", name="heir")),
            "v2": _official(server, "v2"),
            "v3": _official(server, "v3"),
            "command": _command("create", "--name", "c", "--cpus", "2"),
            "command, best effort": _command("create", "--name", "c", "--cpus", "2", "--best-effort"),
            "config": _command("config", "cpus", "kept", "2"),
            "config, best effort": _command("config", "cpus", "kept", "2", "--best-effort"),
            "resume afterwards": _started(lambda: sandkeep.resume_sandbox("kept")),
        }
        print(json.dumps(answers))
    finally:
        server.clear()


def _updated(box: sandkeep.Sandbox) -> sandkeep.Sandbox:
    return box.update(resources=Resources(4))


if __name__ == "__main__":
    main(*sys.argv[1:])
