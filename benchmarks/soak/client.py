"""A client that is killed now and then: it keeps a journal in a sandbox and says what was acknowledged.

Arguments: URL, token, name of the sandbox, this client's own mark, and the entries acknowledged so far.
Prints ``acknowledged ENTRY``, ``error TYPE``, and ``violation TEXT``.
"""

from __future__ import annotations

import sys

from sandkeep import sync
from sandkeep.errors import SandkeepError


def main(url: str, token: str, name: str, mark: str, acknowledged: list[str]) -> None:
    with sync.Client(url, token=token) as client:
        box = client.get_or_create_sandbox(name)
        if acknowledged:
            found = box.fs.read_text("journal").split()
            for entry in acknowledged:
                if entry not in found:
                    say(f"violation {name} has lost the entry {entry}")
        for count in range(1_000_000):
            entry = f"{mark}-{count}"
            try:
                script = f"sleep 0.{count % 5}; echo {entry} >> journal"
                box.run_process("sh", ["-c", script], check=True)
            except SandkeepError as error:
                say(f"error {type(error).__name__}: {error}")
            else:
                say(f"acknowledged {entry}")


def say(text: str) -> None:
    print(text.replace("\n", " "), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:5], sys.argv[5:])
    except SandkeepError as error:
        # The server may be away, which the first request of a client does not wait for.
        say(f"error {type(error).__name__}: {error}")
        sys.exit(1)
