"""``sandkeep events``: what happened, and who had it done."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from sandkeep.cli.framework import App, command, option, sandbox_argument
from sandkeep.cli.output import clean

if TYPE_CHECKING:
    from sandkeep.sync import Event

_KIND_WIDTH: Final = len("session.policy-changed")
_NOTHING: Final[tuple[Any, ...]] = (None, [], "")


@command(
    "events",
    examples=[
        ("everything in the project", "sandkeep events"),
        ("what was run in a sandbox", "sandkeep events web --kind process."),
        ("as it happens", "sandkeep events -f web"),
    ],
)
@sandbox_argument(required=False, help="Only what happened to this sandbox.")
@option("-f", "--follow", is_flag=True, help="Go on as things happen, until interrupted.")
@option("--kind", metavar="KIND", help="Only events whose kind begins so: sandbox., process.started")
def events(app: App, name: str | None, follow: bool, kind: str | None) -> None:
    """Show what happened to a sandbox or in the whole project, oldest first, and who had it done.

    Each line has the time, the kind, the actor (a token or a user of the server's machine; '-' for what came
    by itself), the sandbox and what there is to know. With --json each event is a line.
    """
    found = False
    source = app.client.events if name is None else app.sandbox(name).events
    with closing(source(kind=kind, follow=follow)) as happened:
        for event in happened:
            found = True
            if app.json:
                app.out.record(event)
            else:
                print(_line(event), flush=True)
    if not found and not app.json:
        app.note(f"nothing of that kind happened {'yet' if name is None else f'to {name} yet'}")


def _line(event: Event) -> str:
    time = event.time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    facts = "  ".join(f"{key}={_plain(value)}" for key, value in event.data.items() if value not in _NOTHING)
    words = "  ".join(word for word in (event.sandbox_name, facts) if word)
    return f"{time}  {event.kind:<{_KIND_WIDTH}}  {event.actor or '-'}  {words}".rstrip()


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(clean(str(each)) for each in value)
    return clean(str(value))
