"""Requests generated from the served OpenAPI document: whatever is sent, the server does not fail."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.server.server_process import PROJECT, running_server

SECONDS = (15, 60, 120)
"""For one run. Longer ones only where a slow request, or a slow machine, left too little of the first."""


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_generated_requests_never_fail_the_server(tmp_path: Path) -> None:
    with running_server() as server:
        with server.client() as client:
            made = client.post("/v3/sandboxes", json={"projectId": PROJECT, "name": "fuzzed"}).json()
            session = made["session"]["id"]
            run = client.post(
                f"/v2/sandboxes/sessions/{session}/cmd", json={"command": "sleep", "args": ["99"]}
            )
            command_id = run.json()["command"]["id"]
        # Half of the requests are about things that are there, so that they get past the first look-up.
        parameters = {"session": session, "name": "fuzzed", "command": command_id, "process": command_id}
        config = tmp_path / "schemathesis.toml"
        config.write_text(
            "[parameters]\n" + "".join(f'"path.{name}" = "{value}"\n' for name, value in parameters.items())
        )
        for given in ([], ["--config-file", str(config)]):
            for seconds in SECONDS:
                command = [sys.executable, "-m", "schemathesis.cli", *given]
                command += ["run", f"{server.url}/openapi.json", "--url", server.url]
                command += ["--header", f"Authorization: Bearer {server.token}"]
                command += ["--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing"]
                command += ["--max-time", str(seconds), "--max-examples", "10", "--request-timeout", "60"]
                # Followed for ever, by design: one lists as things happen, the other runs until told to end.
                command += ["--exclude-path", "/v1/events", "--suppress-health-check", "all", "--no-color"]
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=seconds * 6, cwd=tmp_path, check=False
                )
                cases = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
                assert cases is not None, done.stdout[-4000:] + done.stderr[-2000:]
                assert cases[1] == cases[2], done.stdout[-6000:]
                if int(cases[1]) > 500:
                    break
            else:
                pytest.fail(done.stdout[-6000:])
        lines = server.log().splitlines()
        forged = [line for line in lines if not re.match(r"\d{4}-\d\d-\d\dT|the server|sandkeep", line)]
        assert len(forged) < 20, forged  # the greeting apart, every line is one of ours
        # An error after a side effect is answered with something that is not retried, and logged.
        assert "request failed" not in server.log(), server.log()[-4000:]
