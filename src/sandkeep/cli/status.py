"""``sandkeep status``: which server commands would talk to, and whether it runs. Starts nothing."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import sandkeep
from sandkeep.cli.ending import FAILED, Ended
from sandkeep.cli.framework import App, command
from sandkeep.errors import AccessDenied
from sandkeep.paths import data_directory
from sandkeep.types import SessionStatus

if TYPE_CHECKING:
    from sandkeep.sync import Client

_SECONDS = 10.0


@command("status")
def status(app: App) -> None:
    """Show which server is used, whether it runs, and how many sandboxes run on it. Starts nothing.

    Exit status 0 when a server answers, or when one will be started by the first command that needs it; 1
    when there should be one and none answers.
    """
    client = app.client  # what is no URL is refused, not reported as a server that does not answer
    found = _look(app)
    if found["running"]:
        try:
            found["sandboxes"] = _running(client)
        except AccessDenied as error:
            found["sandboxes"], found["refused"] = None, error.message
    if app.json:
        app.out.json(found)
    else:
        app.out.fields(_fields(found))
    if not found["running"] and not found["embedded"]:
        raise Ended(FAILED)


def _look(app: App) -> dict[str, Any]:
    url = app.url
    directory = data_directory(app.data_dir)
    body: dict[str, Any] = {"client": sandkeep.__version__, "url": url, "dataDirectory": None}
    if url is None:
        body |= {"url": f"unix://{os.path.join(directory, 'server.sock')}", "dataDirectory": directory}
    answer = _version(url, directory)
    return {
        **body,
        "running": answer is not None,
        "version": answer and answer.get("version"),
        # Without a URL, whoever needs a server starts one.
        "embedded": bool(answer.get("embedded")) if answer else url is None,
    }


def _version(url: str | None, directory: str) -> dict[str, Any] | None:
    """What a server says about itself; ``None`` when nobody answers."""
    from sandkeep.server.embedded import ask

    if url is not None and url.startswith("unix://"):
        directory, url = os.path.dirname(url.removeprefix("unix://")), None
    if url is None:
        answer = ask(directory, "GET", "/version")
        return None if answer is None else answer[1]
    try:
        with build_opener(ProxyHandler({})).open(f"{url.rstrip('/')}/version", timeout=_SECONDS) as response:
            found: dict[str, Any] = json.load(response)
            return found
    except (URLError, OSError, ValueError):
        return None


def _running(client: Client) -> int:
    from sandkeep.sync import SandboxQueryByCreated

    query = SandboxQueryByCreated(status=SessionStatus.RUNNING, page_size=100)
    return sum(1 for _ in client.query_sandboxes(query))


def _sandboxes(count: int) -> str:
    return f"{count} sandbox{'' if count == 1 else 'es'}"


def _fields(found: dict[str, Any]) -> list[tuple[str, str]]:
    if found["running"]:
        kind = "started by a client, ends when unused" if found["embedded"] else "started by hand"
        state = f"runs, sandkeep {found['version']}, {kind}"
    elif found["embedded"]:
        state = "does not run; the first command that needs it starts it"
    else:
        state = "does not answer"
    rows = [("Server", state), ("At", found["url"])]
    if found["dataDirectory"]:
        rows.append(("Data", found["dataDirectory"]))
    if found["running"]:
        rows.append(("Running", found.get("refused") or _sandboxes(found["sandboxes"])))
    return [*rows, ("Client", f"sandkeep {found['client']}")]
