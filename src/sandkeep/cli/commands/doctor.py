"""``sandkeep doctor``: what this machine can do, as a table or as JSON."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

from sandkeep.cli.app import App
from sandkeep.cli.exit_status import FAILED, Ended
from sandkeep.cli.framework import command
from sandkeep.cli.output import terminal_width
from sandkeep.paths import data_directory

if TYPE_CHECKING:
    from sandkeep.host.doctor import DoctorReport


def render(report: DoctorReport, width: int) -> str:
    """Format the report in columns: status, capability, reason; below each line what to do about it."""
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
    """Check what sessions need on this machine, and look for damage in the data directory.

    For each check that fails it prints why, and what to do. Exit status 0 if sessions can run and nothing in
    the data directory is damaged, otherwise 1.
    """
    from sandkeep.embedded import require_linux

    require_linux()
    from sandkeep.host.doctor import probe
    from sandkeep.server.inspecting import inspect

    directory = data_directory(app.data_dir)
    report, problems = probe(directory), inspect(directory)
    if app.json:
        damage = [{"what": each.what, "why": each.why, "fix": each.fix} for each in problems]
        app.out.json({**report.to_json(), "damage": damage})
    else:
        app.out.line(render(report, terminal_width(sys.stdout) or 110))
        for each in problems:
            app.out.line(f"damaged: {each.what}: {each.why}\n  > {each.fix}")
    if problems or not report.can_run:
        raise Ended(FAILED)
