"""``sandkeep sessions``: the sessions of a sandbox, running and ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sandkeep.cli import present
from sandkeep.cli.app import App
from sandkeep.cli.framework import Group, command, option, sandbox_argument
from sandkeep.cli.listing import gathered, paged, paging, total
from sandkeep.cli.output import ago, span
from sandkeep.states import SortOrder

if TYPE_CHECKING:
    from sandkeep.sync import Session, Usage

sessions = Group("sessions", "List the sessions of a sandbox.", aliases={"list": "ls"})


@command("ls", examples=[("also ended sessions", "sandkeep sessions ls web --all")])
@sandbox_argument()
@option("-a", "--all", "everything", is_flag=True, help="Also list ended sessions.")
@paging
def ls(app: App, name: str, everything: bool, **values: Any) -> None:
    """List the running sessions of a sandbox, or all, newest first."""
    from sandkeep.sync import Page, SessionQuery

    order, box = SortOrder(values["sort_order"] or "desc"), app.sandbox(name)
    page = gathered(
        values,
        lambda size, cursor: box.sessions(SessionQuery(page_size=size, order=order)).page(cursor),
    )
    if not everything:
        page = Page(tuple(session for session in page.items if not session.status.is_final), page.next)
    paged(
        app,
        "sessions",
        page,
        headers=("ID", "STATUS", "CREATED", "RAN", "CPU", "CPUS", "MEMORY", "STARTED FROM"),
        row=_row,
        empty="no sessions" if everything else f"{name} does not run; --all also lists ended sessions",
    )
    if everything:
        total(app, values, page, lambda found: _total(found, box.usage))


def _total(sessions: Sequence[Session], usage: Usage) -> str:
    return f"{len(sessions)} sessions; ended ones {present.usage(usage)}"


def _row(session: Session) -> tuple[str, ...]:
    return (
        session.id,
        session.status.value,
        ago(session.created_at),
        span(session.usage.duration) if session.usage else "-",
        span(session.usage.cpu) if session.usage else "-",
        str(session.resources.cpus),
        f"{session.resources.memory_mb} MB",
        session.source_snapshot_id or "-",
    )


sessions.add_command(ls)
