"""``sandkeep port-forward``: ports of a sandbox on this machine, until interrupted."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from sandkeep.cli import interrupts
from sandkeep.cli.app import App
from sandkeep.cli.exit_status import Ended
from sandkeep.cli.framework import argument, command, option, sandbox_argument
from sandkeep.cli.values import FORWARD

if TYPE_CHECKING:
    from sandkeep.errors import SandkeepError
    from sandkeep.sync import PortForward

_LOOPBACK: Final = "127.0.0.1"


@command(
    "port-forward",
    examples=[
        ("port 3000 of web", "sandkeep port-forward web 3000"),
        ("as port 8080 here", "sandkeep port-forward web 8080:3000"),
        ("several, any free port for the second", "sandkeep port-forward web 3000 0:5432"),
    ],
)
@sandbox_argument()
@argument(
    "ports",
    nargs=-1,
    required=True,
    type=FORWARD,
    metavar="[LOCAL:]REMOTE...",
    help="Port here and port inside; 0 here is any free one.",
)
@option("--address", default=_LOOPBACK, metavar="ADDRESS", help="Address to listen on [default: 127.0.0.1]")
def port_forward(app: App, name: str, ports: tuple[tuple[int, int], ...], address: str) -> None:
    """Make ports of a sandbox ports of this machine, published or not, until interrupted.

    Any protocol over TCP passes, also to a server on another machine. With --json each port is a line.
    """
    box = app.sandbox(name)
    with interrupts.raised(*interrupts.ENDING), ExitStack() as held:
        for local, remote in ports:
            forward = box.forward_port(
                remote, local, address=address, on_failure=lambda error: _failed(app, error)
            )
            _announce(app, name, held.enter_context(forward))
        try:
            threading.Event().wait()
        except (KeyboardInterrupt, Ended):
            interrupts.take_pending()  # this is how it is meant to end


def _announce(app: App, name: str, forward: PortForward) -> None:
    if app.json:
        app.out.record({"address": forward.address, "port": forward.port, "remote": forward.remote})
        return
    host = f"[{forward.address}]" if ":" in forward.address else forward.address
    print(f"{host}:{forward.port} leads to port {forward.remote} of {name}", flush=True)


def _failed(app: App, error: SandkeepError) -> None:
    app.note(f"a connection failed: {error.message}")
