"""``sandkeep net``: the network activity of a sandbox, and the rules that decided on it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from sandkeep.cli.app import App
from sandkeep.cli.framework import command, option, sandbox_argument
from sandkeep.cli.output import clean, size

if TYPE_CHECKING:
    from sandkeep.sync import NetworkEvent

_STYLES = {"allow": "green", "deny": "red"}
_KIND_WIDTH = len("connection")


@command(
    "net",
    examples=[
        ("so far", "sandkeep net web"),
        ("as it happens", "sandkeep net -f web"),
    ],
)
@sandbox_argument()
@option("-f", "--follow", is_flag=True, help="Show new events as they happen, until interrupted.")
def net(app: App, name: str, follow: bool) -> None:
    """Show the network activity of a sandbox: names, connections and requests, allowed or denied.

    Each line has the time, the kind, the verdict, the name or address with its port, the request, the bytes
    and the rule or reason. With --json each event is a line.
    """
    found = False
    with closing(app.sandbox(name).network_events(follow=follow)) as events:
        for event in events:
            found = True
            if app.json:
                app.out.record(event)
            else:
                print(_line(app, event), flush=True)
    if not found and not app.json:
        app.note(f"no network activity of {name} yet")


def _line(app: App, event: NetworkEvent) -> str:
    time = event.time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    verdict = app.out.paint(f"{event.verdict or '-':<5}", _STYLES.get(event.verdict or "", ""))
    parts = [_where(event), _request(event), _bytes(event), _why(event)]
    words = "  ".join(clean(part) for part in parts if part)
    return f"{time}  {event.kind:<{_KIND_WIDTH}}  {verdict}  {words}".rstrip()


def _where(event: NetworkEvent) -> str:
    host = event.name or event.address or ""
    if event.port is None:
        return host
    # IPv6 addresses contain colons.
    return f"[{host}]:{event.port}" if ":" in host else f"{host}:{event.port}"


def _request(event: NetworkEvent) -> str:
    if event.method is not None:
        status = "" if event.status is None else f" {event.status}"
        return f"{event.method} {event.path or ''}{status}"
    return event.query_type or ""


def _bytes(event: NetworkEvent) -> str:
    if event.received_bytes is None or event.sent_bytes is None:
        return ""
    return f"{size(event.received_bytes)} in, {size(event.sent_bytes)} out"


def _why(event: NetworkEvent) -> str:
    if event.count is not None:
        return f"{event.count} events left out"
    if event.rule is not None:
        return f"rule {event.rule}"
    return event.reason or ""
