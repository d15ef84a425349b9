"""Commands use the SDK and the server's API; only those that must work without a server go past them."""

from __future__ import annotations

import re
from pathlib import Path

import sandkeep.cli

CLI = Path(sandkeep.cli.__file__).parent
PAST_THE_API = {
    "commands/doctor.py": "examines the machine and a data directory that may be damaged",
    "commands/repair.py": "--adopt recovers a data directory that no server can open",
    "commands/serve.py": "is the server",
    "commands/server.py": "ends the process of a server, which may not answer",
    "commands/uninstall.py": "removes a data directory that no server may be able to open",
    "holdings.py": "measures a data directory for status and uninstall, which start no server",
}


def test_only_commands_that_need_no_server_import_its_parts() -> None:
    found = {
        str(path.relative_to(CLI))
        for path in CLI.rglob("*.py")
        if re.search(r"^\s*from sandkeep\.(server|store|engine|host|net|linux)\b", path.read_text(), re.M)
    }
    assert found == PAST_THE_API.keys()
