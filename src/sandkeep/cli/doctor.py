"""``sandkeep doctor``: what this machine can do, as a table for people or JSON for programs."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

from sandkeep.cli.ending import FAILED, Ended
from sandkeep.cli.framework import App, command
from sandkeep.cli.output import terminal_width
from sandkeep.paths import data_directory

if TYPE_CHECKING:
    from sandkeep.host.doctor import Report


def render(report: Report, width: int) -> str:
    """Aligned columns: status, capability, why; what to do goes below the line it belongs to."""
    names = max(len(found.name) for found in report.findings)
    indent = " " * (10 + names + 2)
    room = max(width - len(indent), 40)
    lines = []
    for found in report.findings:
        why = textwrap.wrap(found.why, room, break_on_hyphens=False) or [""]
        lines.append(f"{found.status:<10}{found.name:<{names}}  {why[0]}")
        lines += [indent + more for more in why[1:]]
        if found.fix:
            fix = textwrap.wrap(found.fix, room - 2, break_on_hyphens=False)
            lines += [f"{indent}{'> ' if first == 0 else '  '}{text}" for first, text in enumerate(fix)]
    if report.can_run:
        verdict = f"Sessions can run here ({report.mode})."
    else:
        verdict = f"Sessions cannot run here ({report.mode}): see what is missing above."
    return "\n".join([*lines, "", verdict])


@command("doctor", connection=False)
def doctor(app: App) -> None:
    """Try what sessions need and say what works, why not, and what to do.

    Exit status 0 when sessions can run, 1 when they cannot.
    """
    from sandkeep.host.doctor import probe

    report = probe(data_directory(app.data_dir))
    if app.json:
        app.out.json(report.to_json())
    else:
        app.out.line(render(report, terminal_width(sys.stdout) or 110))
    if not report.can_run:
        raise Ended(FAILED)
