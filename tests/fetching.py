"""Programs as people have them, fetching a URL with the machine's own resolver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tests.polling import ENOUGH

_COMMANDS = {
    "python": [
        sys.executable,
        "-c",
        "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())",
    ],
    "node": [
        "node",
        "-e",
        "fetch(process.argv[1]).then(async (answer) => console.log(await answer.text()))",
    ],
    "curl": ["curl", "-sS"],
}
PROGRAMS = tuple(name for name, (command, *_) in _COMMANDS.items() if shutil.which(command))


def fetch(program: str, url: str) -> str:
    """What a program gets, without a proxy in between."""
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    command = [*_COMMANDS[program], url]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ENOUGH)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
