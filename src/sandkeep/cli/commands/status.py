"""``sandkeep status``: which server commands would talk to, and whether it runs. Starts nothing."""

from __future__ import annotations

import json
import os
import ssl
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from sandkeep.cli.app import App
from sandkeep.cli.exit_status import FAILED, Ended
from sandkeep.cli.framework import command
from sandkeep.errors import AccessDenied
from sandkeep.paths import data_directory
from sandkeep.states import SessionStatus
from sandkeep.version import __version__

if TYPE_CHECKING:
    from sandkeep.sync import Client

_SECONDS = 10.0
_MEASURE_SECONDS = 3.0
"""Time limit for measuring files: the user waits for the rest of the output."""


@command("status")
def status(app: App) -> None:
    """Show which server is used, whether it runs, and how many sandboxes run on it. Starts nothing.

    For the server of this machine it also shows the data directory, what it holds, and its size on disk. Data
    is kept until it is removed or expires; 'sandkeep uninstall' removes all of it.

    Exit status 0 if a server answers, or if the first command that needs one would start it; 1 if the server
    that is named does not answer.
    """
    client = app.client  # refuses an invalid URL, instead of reporting a server that does not answer
    found = _survey(app)
    if found["running"]:
        try:
            found["sandboxes"] = _running(client)
        except AccessDenied as error:
            found["sandboxes"], found["refused"] = None, error.message
    if (directory := found["dataDirectory"]) and os.path.isdir(directory):
        from sandkeep.cli.holdings import holdings

        found["kept"] = holdings(directory, seconds=_MEASURE_SECONDS)
    if app.json:
        app.out.json(found)
    else:
        app.out.fields(_fields(found))
    if not found["running"] and not found["embedded"]:
        raise Ended(FAILED)


def _survey(app: App) -> dict[str, Any]:
    url = app.url
    directory = data_directory(app.data_dir)
    body: dict[str, Any] = {"client": __version__, "url": url, "dataDirectory": None}
    if url is None:
        body |= {"url": f"unix://{os.path.join(directory, 'server.sock')}", "dataDirectory": directory}
    problem: str | None = None
    try:
        answer = _version(url, directory)
    except (OSError, ValueError) as error:
        answer, problem = None, _problem(error)
    return {
        **body,
        "running": answer is not None,
        "problem": problem,
        "version": answer and answer.get("version"),
        # Without a URL, the first command that needs a server starts it.
        "embedded": bool(answer.get("embedded")) if answer else url is None,
    }


def _version(url: str | None, directory: str) -> dict[str, Any] | None:
    """Return the server's response to ``/version``; ``None`` if no server answers."""
    from sandkeep.embedded import ask

    if url is not None and url.startswith("unix://"):
        directory, url = os.path.dirname(url.removeprefix("unix://")), None
    if url is None:
        answer = ask(directory, "GET", "/version")
        return None if answer is None else answer[1]
    with build_opener(ProxyHandler({})).open(f"{url.rstrip('/')}/version", timeout=_SECONDS) as response:
        found: dict[str, Any] = json.load(response)
        return found


def _problem(error: OSError | ValueError) -> str:
    """Describe why a server did not answer, for its operator."""
    if isinstance(error, HTTPError):
        return f"answers {error.code} ({error.reason}), as no sandkeep server does"
    if isinstance(error, ValueError):
        return "answers with something else than JSON, as no sandkeep server does"
    why = error.reason if isinstance(error, URLError) else error
    if isinstance(why, ssl.SSLCertVerificationError):
        return (
            f"is not trusted: its certificate is refused ({why.verify_message}); "
            "name the file of the authority that signed it in SSL_CERT_FILE"
        )
    return f"does not answer: {getattr(why, 'strerror', None) or why}"


def _running(client: Client) -> int:
    from sandkeep.sync import SandboxQueryByCreated

    query = SandboxQueryByCreated(status=SessionStatus.RUNNING, page_size=100)
    return sum(1 for _ in client.query_sandboxes(query))


def _sandboxes(count: int) -> str:
    return f"{count} sandbox{'' if count == 1 else 'es'}"


def _kept(found: dict[str, Any] | None) -> str:
    if found is None:
        return "nothing yet"
    from sandkeep.cli.holdings import summary

    return summary(found)


def _fields(found: dict[str, Any]) -> list[tuple[str, str]]:
    if found["running"]:
        kind = "started by a client, ends when unused" if found["embedded"] else "started by hand"
        state = f"runs, sandkeep {found['version']}, {kind}"
    elif found["embedded"]:
        state = "does not run; the first command that needs it starts it"
    else:
        state = found["problem"] or "does not answer"
    rows = [("Server", state), ("At", found["url"])]
    if found["dataDirectory"]:
        rows += [("Data", found["dataDirectory"]), ("Kept", _kept(found.get("kept")))]
    if found["running"]:
        rows.append(("Running", found.get("refused") or _sandboxes(found["sandboxes"])))
    return [*rows, ("Client", f"sandkeep {found['client']}")]
