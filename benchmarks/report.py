"""Rows as a table, as JSON, as pictures."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.rows import Row
from sandkeep import __version__

_HEAD = ("what", "median", "p99", "cpu", "reference", "ratio", "budget", "")


def machine() -> dict[str, Any]:
    """Where and when something was measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "sandkeep": __version__,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9),
        "root": os.geteuid() == 0,
    }


def table(rows: Sequence[Row]) -> str:
    """Markdown that reads well in a terminal too."""
    lines = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(_line(cells, widths) for cells in (lines[0], rule, *lines[1:]))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"


def _cells(row: Row) -> tuple[str, ...]:
    verdict = {True: "met", False: "MISSED", None: ""}[row.met]
    last = "; ".join(text for text in (verdict, row.note) if text)
    reference = "" if row.reference_median is None else f"{row.reference} {_figure(row.reference_median)}"
    return (
        row.name,
        "" if row.median is None else f"{_figure(row.median)} {row.unit}",
        "" if row.p99 is None or row.samples < 3 else _figure(row.p99),
        _cost(row),
        reference,
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.budget or "",
        last,
    )


def _cost(row: Row) -> str:
    """Instructions where they are counted, they say more; else time."""
    if row.instructions is not None:
        return f"{_figure(row.instructions / 1e6)} M"
    return "" if row.cpu_ms is None else f"{_figure(row.cpu_ms)} ms"


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def plots(rows: Sequence[Row], directory: str) -> str | None:
    """A picture of every budget and how much of it is used; returns its path, or nothing to draw with."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    judged = [(row, _used(row)) for row in rows if row.met is not None]
    figure, axes = pyplot.subplots(figsize=(9, 0.5 + 0.34 * len(judged)), layout="constrained")
    names = [
        f"{row.name} : {row.reference}" if row.ratio and row.reference else row.name for row, _ in judged
    ]
    colours = ["#3a7d44" if row.met else "#b3261e" for row, _ in judged]
    axes.barh(range(len(judged)), [used for _, used in judged], color=colours, height=0.6)
    axes.set_yticks(range(len(judged)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("share of the budget that is used (left of the line is within)")
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, "budgets.png")
    figure.savefig(path, dpi=110)
    return path


def _used(row: Row) -> float:
    assert row.budget is not None and row.median is not None
    sign, number, kind = row.budget.split(" ", 2)
    value = row.ratio if kind == "×" else row.median
    assert value is not None
    return float(number) / value if sign == "≥" else value / float(number)
