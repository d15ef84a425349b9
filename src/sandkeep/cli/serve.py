"""``sandkeep serve``: the server in the foreground, or detached for a client that needs one."""

from __future__ import annotations

import argparse
import os

from sandkeep.paths import data_directory

EMBEDDED_IDLE_SECONDS = 300.0


def serve_command(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="sandkeep serve",
        description="Serve the API on a unix socket in the data directory and, when asked, on TCP. "
        "Stopping the server leaves sandboxes running.",
    )
    parser.add_argument("--data-dir", default=None, help="where sandboxes live (default: SANDKEEP_HOME)")
    parser.add_argument("--host", default=None, help="listen on TCP at this address (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=None, help="listen on TCP at this port; 0 is any")
    parser.add_argument("--public-url", default=None, help="how clients reach the server behind a proxy")
    parser.add_argument("--settings", default=None, help="JSON file (default: settings.json, if it exists)")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument(
        "--idle-exit", type=float, default=None, metavar="SECONDS", help="end when unused for so long"
    )
    parser.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.port is not None and not 0 <= options.port <= 65535:
        parser.error("--port is between 0 and 65535")
    if options.ready_fd is not None:
        os.set_inheritable(options.ready_fd, False)
    if options.embedded:
        _detach()
    from sandkeep.server.configuration import read_settings
    from sandkeep.server.serve import Options, run

    idle = options.idle_exit
    directory = data_directory(options.data_dir)
    return run(
        directory,
        Options(
            host=options.host,
            port=options.port,
            log_format=options.log_format,
            log_level=options.log_level,
            idle_exit=EMBEDDED_IDLE_SECONDS if options.embedded and idle is None else idle,
            embedded=options.embedded,
            public_url=options.public_url,
            ready_fd=options.ready_fd,
            quiet=options.embedded,
        ),
        settings=read_settings(directory, options.settings),
    )


def _detach() -> None:
    """Belong to nobody: the client that started us may end, be interrupted, or wait for its children."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
