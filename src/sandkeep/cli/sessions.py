"""``sandkeep sessions``: the executions of a sandbox, running and over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sandkeep.cli.framework import App, Group, command, option, sandbox_argument
from sandkeep.cli.listing import paged, paging
from sandkeep.cli.output import ago, span
from sandkeep.types import SortOrder

if TYPE_CHECKING:
    from sandkeep.sync import Session

sessions = Group("sessions", "List the sessions of a sandbox.", aliases={"list": "ls"})


@command("ls", examples=[("those that are over, too", "sandkeep sessions ls web --all")])
@sandbox_argument()
@option("-a", "--all", "everything", is_flag=True, help="Also those that are over.")
@paging
def ls(app: App, name: str, everything: bool, **values: Any) -> None:
    """List the sessions of a sandbox, newest first: those that run, or all."""
    from sandkeep.sync import Page, SessionQuery

    query = SessionQuery(page_size=values["limit"], order=SortOrder(values["sort_order"] or "desc"))
    page = app.sandbox(name).sessions(query).page(values["cursor"])
    if not everything:
        page = Page(tuple(session for session in page.items if not session.status.is_final), page.next)
    paged(
        app,
        "sessions",
        page,
        headers=("ID", "STATUS", "CREATED", "RAN", "CPU", "VCPUS", "STARTED FROM"),
        row=_row,
        empty="no sessions" if everything else f"{name} does not run; --all shows the sessions that are over",
    )


def _row(session: Session) -> tuple[str, ...]:
    return (
        session.id,
        session.status.value,
        ago(session.created_at),
        span(session.usage.duration) if session.usage else "-",
        span(session.usage.cpu) if session.usage else "-",
        str(session.resources.vcpus),
        session.source_snapshot_id or "-",
    )


sessions.add_command(ls)
