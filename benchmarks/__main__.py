"""How fast sandkeep is on this machine, next to what the machine does without it, and within which budgets.

Ends with status 1 when a budget is missed, 2 when something could not be measured because it failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable

from benchmarks import growth, host, latency, load, neighbours, net, report, snapshots, startup, transfer
from benchmarks.lab import Lab
from benchmarks.rows import Row, not_measured

Benchmark = Callable[[Lab], Awaitable[list[Row]]]

USUAL: dict[str, Benchmark] = {
    "create": latency.create,
    "run": latency.run,
    "stop-resume": snapshots.stop_and_resume,
    "checkpoint": snapshots.checkpoint,
    "forks": snapshots.forks,
    "many-files": transfer.many_files,
    "big-file": transfer.big_file,
    "output": transfer.output,
    "relay": transfer.relay,
    "neighbours": neighbours.neighbours,
    "idle": load.idle,
    "connections": load.connections,
    "rates": load.rates,
    "command-line": startup.command_line,
    "one-run": startup.one_run,
    "embedded": startup.embedded,
}
GROWTH: dict[str, Benchmark] = {
    "growth-sandboxes": growth.sandboxes,
    "growth-snapshots": growth.snapshots,
    "growth-lines": growth.lines,
}
DETAIL: dict[str, Benchmark] = {"host": host.host, "net": net.net}
"""Only by name: parts of what is measured as a whole above."""
ALL = {**USUAL, **GROWTH, **DETAIL}
PICTURES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "docs", "images")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def measure(chosen: dict[str, Benchmark], directory: str, *, quick: bool) -> tuple[list[Row], bool]:
    """All rows, and whether every benchmark got through."""
    rows: list[Row] = []
    whole = True
    async with Lab(directory, quick=quick) as lab:
        for name, benchmark in chosen.items():
            say(f"measuring {name} (load {os.getloadavg()[0]:.1f})")
            try:
                rows += await benchmark(lab)
            except Exception as error:
                # One that fails must not take the figures of the others with it.
                traceback.print_exc()
                rows.append(not_measured(name, f"{type(error).__name__}: {error}"))
                whole = False
    return rows, whole


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/run", description=(__doc__ or "").strip())
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--growth", action="store_true", help="also measure with much there already")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        choices=ALL,
        help=", ".join(ALL),
    )
    parser.add_argument(
        "--plots", action="store_true", help="draw docs/images/budgets.png (needs matplotlib)"
    )
    parser.add_argument(
        "--directory", help="where to keep data during the run; a temporary directory if not given"
    )
    return parser.parse_args()


def main() -> int:
    options = arguments()
    chosen = {**USUAL, **GROWTH} if options.growth else dict(USUAL)
    if options.only:
        chosen = {name: benchmark for name, benchmark in ALL.items() if name in options.only}
    with tempfile.TemporaryDirectory(prefix="sandkeep-bench-", dir=options.directory) as directory:
        rows, whole = asyncio.run(measure(chosen, directory, quick=options.quick))
    where = report.machine()
    if options.json:
        print(json.dumps({**where, "rows": [row.to_json() for row in rows]}, indent=2, ensure_ascii=False))
    else:
        print(", ".join(f"{name} {value}" for name, value in where.items()) + "\n")
        print(report.table(rows))
    if options.plots:
        path = report.plots(rows, PICTURES)
        say(f"drew {path}" if path else "no pictures: matplotlib is not installed")
    if not whole:
        return 2
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
