"""``sandkeep events``: events and who caused them."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from sandkeep.cli.app import App
from sandkeep.cli.framework import command, option, sandbox_argument
from sandkeep.cli.output import clean

if TYPE_CHECKING:
    from sandkeep.sync import Event

_KIND_WIDTH: Final = len("session.policy-changed")
_NOTHING: Final[tuple[Any, ...]] = (None, [], "")


@command(
    "events",
    examples=[
        ("all of the project", "sandkeep events"),
        ("processes of a sandbox", "sandkeep events web --kind process."),
        ("as it happens", "sandkeep events -f web"),
    ],
)
@sandbox_argument(required=False, help="Only events of this sandbox.")
@option("-f", "--follow", is_flag=True, help="Show new events as they happen, until interrupted.")
@option("--kind", metavar="KIND", help="Only events whose kind begins with this: sandbox., process.started")
def events(app: App, name: str | None, follow: bool, kind: str | None) -> None:
    """Show the events of a sandbox or of the whole project, oldest first, and who caused them.

    Each line has the time, the kind, the actor (a token or a user of the server's machine; '-' if the server
    acted by itself), the sandbox and details. With --json each event is a line.
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
        app.note(f"no such event yet{'' if name is None else f' of {name}'}")


def _line(event: Event) -> str:
    time = event.time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    facts = "  ".join(f"{key}={_plain(value)}" for key, value in event.data.items() if value not in _NOTHING)
    words = "  ".join(word for word in (event.sandbox_name, facts) if word)
    return f"{time}  {event.kind:<{_KIND_WIDTH}}  {event.actor or '-'}  {words}".rstrip()


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(clean(str(each)) for each in value)
    return clean(str(value))
