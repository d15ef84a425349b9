"""A data directory is all there is: packed, unpacked elsewhere and served again."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.conftest import create, scoped
from tests.server.server_process import ServerProcess, running_server

TAR = ("tar", "--xattrs", "--xattrs-include=*", "--numeric-owner")
WRITE = "echo precious > file; sudo install -o nobody -m 600 file theirs; sudo rm -r /etc/skel; mkdir -p a/b"
LOOK = "cat file; stat -c '%U %a' theirs; test -e /etc/skel || echo gone; ls a"


@pytest.mark.root
def test_a_data_directory_can_be_moved(able: None, tmp_path: Path) -> None:
    with running_server() as first:
        with first.client() as api:
            box = create(api)
            assert box.run("bash", "-c", WRITE).status_code == 200
            api.put(f"/v1/secrets/{box.name}", params=scoped(), json={"value": "sealed"})
            kept = api.post(f"{box.path}/stop").json()["session"]
            assert kept["status"] == "stopped"
        first.stop()
        archive = tmp_path / "backup.tar"
        subprocess.run([*TAR, "-C", first.data, "-cf", archive, "."], check=True, stderr=subprocess.DEVNULL)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        subprocess.run([*TAR, "-C", elsewhere, "-xpf", archive], check=True)
        second = ServerProcess(elsewhere)
        second.token = first.token
        second.start()
        try:
            with second.client() as api:
                found = api.get(f"/v2/sandboxes/{box.name}", params=scoped(resume="true")).json()
                path = f"/v2/sandboxes/sessions/{found['session']['id']}"
                body = {"command": "bash", "args": ["-c", LOOK], "wait": True, "logs": True}
                lines = map(json.loads, api.post(f"{path}/cmd", json=body).text.splitlines())
                printed = "".join(line["data"] for line in lines if line.get("stream") == "stdout")
                assert printed == "precious\nnobody 600\ngone\nb\n"
                assert api.get("/v1/secrets", params=scoped()).json()["secrets"][0]["name"] == box.name
                assert api.delete(f"/v2/sandboxes/{box.name}", params=scoped()).status_code == 200
        finally:
            second.stop()
            shutil.rmtree(elsewhere)
