"""``sandkeep serve``: the server in the foreground, or detached when a client starts it."""

from __future__ import annotations

import os

import click

from sandkeep.cli.app import App
from sandkeep.cli.exit_status import Ended
from sandkeep.cli.framework import command, option
from sandkeep.cli.values import NumberType
from sandkeep.embedded import require_linux
from sandkeep.errors import SandkeepError
from sandkeep.paths import data_directory

EMBEDDED_IDLE_SECONDS = 300.0


@command(
    "serve",
    connection=False,
    json=False,
    examples=[
        ("for this machine only", "sandkeep serve"),
        ("for other machines, with tokens", "sandkeep serve --host 0.0.0.0 --port 8080"),
    ],
)
@option("--host", metavar="ADDRESS", help="Listen on TCP at this address [default: 127.0.0.1 with --port]")
@option(
    "--port",
    type=NumberType(0, 65535),
    metavar="PORT",
    help="Listen on TCP at this port; 0 picks a free one.",
)
@option("--public-url", metavar="URL", help="URL of the server for clients, if it is behind a proxy.")
@option(
    "--settings",
    metavar="FILE",
    help="JSON file [default: settings.json in the data directory, if it exists]",
)
@option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of the log on standard error.",
)
@option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Lowest level that is logged.",
)
@option("--idle-exit", type=float, metavar="SECONDS", help="End after this time without use.")
@option(
    "--adopt",
    is_flag=True,
    help="Recover layers and sessions that are missing in the store of the data directory.",
)
@option("--embedded", is_flag=True, hidden=True)
@option("--ready-fd", type=int, hidden=True)
def serve(
    app: App,
    host: str | None,
    port: int | None,
    public_url: str | None,
    settings: str | None,
    log_format: str,
    log_level: str,
    idle_exit: float | None,
    adopt: bool,
    embedded: bool,
    ready_fd: int | None,
) -> None:
    """Serve the API on a unix socket in the data directory and, with --host or --port, on TCP.

    Over TCP clients need a token, which 'sandkeep token create' creates. Stopping the server leaves sandboxes
    running.
    """
    require_linux()
    if ready_fd is not None:
        os.set_inheritable(ready_fd, False)
    if embedded:
        _detach()
    from sandkeep.linux import openfiles
    from sandkeep.server.configuration import read_settings
    from sandkeep.server.serve import Options, run, tell_failure

    openfiles.use_all()
    directory = data_directory(app.data_dir)
    try:
        decided = read_settings(directory, settings)
    except (SandkeepError, OSError) as error:
        tell_failure(ready_fd, error)
        raise
    status = run(
        directory,
        Options(
            host=host,
            port=port,
            log_format=log_format,
            log_level=log_level,
            idle_exit=EMBEDDED_IDLE_SECONDS if embedded and idle_exit is None else idle_exit,
            embedded=embedded,
            public_url=public_url,
            ready_fd=ready_fd,
            quiet=embedded,
            adopt=adopt,
        ),
        settings=decided,
    )
    raise Ended(status)


def _detach() -> None:
    """Detach from the client that started us: it may end, be interrupted, or wait for its children."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
