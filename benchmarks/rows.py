"""What a benchmark yields: samples, rows made of them, and whether a row keeps its budget."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from benchmarks.counters import Cost, spent

T = TypeVar("T")

MILLISECONDS, RATE, MEGABYTES_A_SECOND, MEGABYTES = "ms", "/s", "MB/s", "MB"
_MORE_IS_BETTER = (RATE, MEGABYTES_A_SECOND)


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit for a row's ratio to its reference, or for its median where it has none."""

    limit: float
    of_ratio: bool
    at_least: bool

    @classmethod
    def at_most(cls, limit: float, *, ratio: bool = True) -> Budget:
        return cls(limit, ratio, False)

    @classmethod
    def no_less(cls, limit: float, *, ratio: bool = True) -> Budget:
        return cls(limit, ratio, True)

    def met(self, *, median: float, ratio: float | None) -> bool:
        value = ratio if self.of_ratio else median
        assert value is not None, "a budget for a ratio needs a reference"
        return value >= self.limit if self.at_least else value <= self.limit

    def text(self, unit: str) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{sign} {self.limit:g} ×" if self.of_ratio else f"{sign} {self.limit:g} {unit}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``p99`` is the worst sample but one in a hundred."""

    name: str
    unit: str = MILLISECONDS
    median: float | None = None
    p99: float | None = None
    samples: int = 0
    reference: str | None = None
    reference_median: float | None = None
    ratio: float | None = None
    cpu_ms: float | None = None
    """CPU of all processes involved, per repetition."""
    instructions: float | None = None
    budget: str | None = None
    met: bool | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def not_measured(name: str, why: str) -> Row:
    """A row that says why it has no figures."""
    return Row(name, note=f"not measured: {why}")


class Series(list[float]):
    """Samples of one thing, and what each cost."""

    def __init__(self, values: Iterable[float] = (), *, costs: Iterable[Cost] = ()) -> None:
        super().__init__(values)
        self.costs = list(costs)

    def _median(self, values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    @property
    def cpu_ms(self) -> float | None:
        seconds = self._median([cost.cpu_seconds for cost in self.costs])
        return None if seconds is None else seconds * 1000

    @property
    def instructions(self) -> float | None:
        return self._median([cost.instructions for cost in self.costs])


def row(
    name: str,
    samples: Sequence[float],
    *,
    unit: str = MILLISECONDS,
    reference: tuple[str, Sequence[float]] | None = None,
    budget: Budget | None = None,
    note: str = "",
) -> Row:
    """A row from samples in its unit; seconds become milliseconds. Without a reference it has no ratio."""
    scale = 1000.0 if unit == MILLISECONDS else 1.0
    values = sorted(value * scale for value in samples)
    if unit in _MORE_IS_BETTER:
        values.reverse()
    median = statistics.median(values)
    other = None if reference is None or not reference[1] else statistics.median(reference[1]) * scale
    ratio = None if not other else median / other
    met = None
    if budget is not None and (ratio is not None or not budget.of_ratio):
        met = budget.met(median=median, ratio=ratio)
    if reference is not None and other is None:
        note = f"{reference[0]} is not installed; {note}".rstrip("; ")
    return Row(
        name,
        unit,
        median,
        values[min(len(values) - 1, int(len(values) * 0.99))],
        len(values),
        None if reference is None else reference[0],
        other,
        ratio,
        samples.cpu_ms if isinstance(samples, Series) else None,
        samples.instructions if isinstance(samples, Series) else None,
        None if budget is None else budget.text(unit),
        met,
        note,
    )


class Samples:
    """Seconds by name. Names that were never timed have no samples."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = defaultdict(Series)

    def __getitem__(self, what: str) -> Series:
        return self._series[what]

    def add(self, what: str, value: float) -> None:
        self._series[what].append(value)

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        before = spent()
        started = time.perf_counter()
        yield
        self._series[what].append(time.perf_counter() - started)
        self._series[what].costs.append(spent() - before)

    async def wait(self, what: str, work: Awaitable[T]) -> T:
        with self.of(what):
            return await work


async def repeat(
    rounds: int, step: Callable[[Samples, int], Awaitable[None]], *, warm_up: int = 3
) -> Samples:
    """Do a whole round many times. What a round compares is then measured in turn, under the same load."""
    for number in range(warm_up):
        await step(Samples(), -1 - number)
    samples = Samples()
    for number in range(rounds):
        await step(samples, number)
    return samples
