"""``sandkeep serve``: the server in the foreground, or detached for a client that needs one."""

from __future__ import annotations

import os

import click

from sandkeep.cli.ending import Ended
from sandkeep.cli.framework import App, command, option
from sandkeep.cli.values import NumberType
from sandkeep.paths import data_directory

EMBEDDED_IDLE_SECONDS = 300.0


@command(
    "serve",
    connection=False,
    json=False,
    examples=[
        ("for this machine only", "sandkeep serve"),
        ("for others, who need a token", "sandkeep serve --host 0.0.0.0 --port 8080"),
    ],
)
@option("--host", metavar="ADDRESS", help="Listen on TCP at this address [default: 127.0.0.1 with --port]")
@option("--port", type=NumberType(0, 65535), metavar="PORT", help="Listen on TCP at this port; 0 is any.")
@option("--public-url", metavar="URL", help="How clients reach the server behind a proxy.")
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
    help="How the log is written, on standard error.",
)
@option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is worth a line.",
)
@option("--idle-exit", type=float, metavar="SECONDS", help="End when unused for so long.")
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
    embedded: bool,
    ready_fd: int | None,
) -> None:
    """Serve the API on a unix socket in the data directory and, when asked, on TCP.

    Over TCP clients need a token, which 'sandkeep token create' makes. Stopping the server leaves sandboxes
    running.
    """
    if ready_fd is not None:
        os.set_inheritable(ready_fd, False)
    if embedded:
        _detach()
    from sandkeep.server.configuration import read_settings
    from sandkeep.server.serve import Options, run

    directory = data_directory(app.data_dir)
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
        ),
        settings=read_settings(directory, settings),
    )
    raise Ended(status)


def _detach() -> None:
    """Belong to nobody: the client that started us may end, be interrupted, or wait for its children."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
