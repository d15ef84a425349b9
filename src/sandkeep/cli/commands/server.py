"""``sandkeep server``: the server that clients start in the background."""

from __future__ import annotations

from sandkeep.cli.app import App
from sandkeep.cli.framework import Group, command
from sandkeep.errors import Conflict
from sandkeep.paths import data_directory

server = Group(
    "server",
    "Manage the server that the first command starts in the background.",
    absent={
        "start": "the first command that needs it starts it; 'sandkeep serve' runs one in the foreground",
        "restart": "'sandkeep server stop' stops it, and the next command starts another",
        "status": "that is 'sandkeep status'",
    },
)


@command("stop", connection=False)
def stop(app: App) -> None:
    """Stop the server in the background. Sandboxes run on, and the next command starts another server.

    A server that was started with 'sandkeep serve' must be stopped where it was started.
    """
    from sandkeep.cli.holdings import plural, running
    from sandkeep.embedded import ask
    from sandkeep.host import datadir

    directory = data_directory(app.data_dir)
    pid = datadir.server_of(directory)
    if pid is not None:
        answer = ask(directory, "GET", "/version")
        if answer is not None and not answer[1].get("embedded"):
            raise Conflict(
                f"the server of {directory} (process {pid}) was started by hand",
                hint="stop it where it was started: Ctrl-C, or 'systemctl stop' of its unit",
            )
        with app.busy("Stopping the server"):
            datadir.end_server(pid)
    runs_on = running(directory)
    if app.json:
        app.out.json({"dataDirectory": directory, "stopped": pid is not None, "runningSandboxes": runs_on})
    elif pid is None:
        app.note(f"no server runs on {directory}")
    else:
        app.out.line(f"stopped the server of {directory}")
        if runs_on:
            verb = "runs" if runs_on == 1 else "run"
            app.note(
                f"  {plural(runs_on, 'sandbox', 'es')} {verb} on; the next command starts another server"
            )


server.add_command(stop)
