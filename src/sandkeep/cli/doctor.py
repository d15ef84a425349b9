"""``sandkeep doctor``: what this machine can do, as a table for people or JSON for programs."""

from __future__ import annotations

import argparse
import json
import os
import textwrap

from sandkeep.host.doctor import Report, probe
from sandkeep.paths import data_directory


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


def doctor_command(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="sandkeep doctor",
        description="Try what sessions need and say what works, why not, and what to do. "
        "Exit status 0 when sessions can run, 1 when they cannot.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--data-dir", default=None, help="where sandboxes live (default: SANDKEEP_HOME)")
    options = parser.parse_args(args)
    report = probe(data_directory(options.data_dir))
    if options.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        try:
            width = os.get_terminal_size().columns
        except OSError:
            width = 110
        print(render(report, width))
    return 0 if report.can_run else 1
