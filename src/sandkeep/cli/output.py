"""Output for people and programs: tables that fit, JSON, colours, words for sizes and times.

Results go to standard output, everything else to standard error. Colour and moving text appear on terminals
only, and never with ``NO_COLOR``. Text that came from a sandbox is shown with its control characters spelled
out, so that it cannot control the terminal.

In JSON, keys are in camelCase, times are RFC 3339, durations are seconds and sizes are bytes.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import IO, Any, Final
from unicodedata import combining, east_asian_width

_CODES: Final = {"red": 31, "green": 32, "yellow": 33, "cyan": 36, "bold": 1, "dim": 2}
_STATUS_STYLES: Final = {
    "running": "green",
    "pending": "yellow",
    "stopping": "yellow",
    "snapshotting": "yellow",
    "failed": "red",
    "aborted": "red",
    "killed": "red",
    "lost": "red",
    "deleted": "dim",
    "stopped": "dim",
}
_NARROW: Final = 6
_NARROWEST: Final = 3


def shows_colour(stream: IO[str]) -> bool:
    """Whether a stream is a terminal whose user wants colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, style: str, *, colour: bool) -> str:
    return f"\033[{_CODES[style]}m{text}\033[0m" if colour and style else text


def clean(text: str) -> str:
    """Return text with control characters spelled out, so that a terminal does not act upon them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def terminal_width(stream: IO[str]) -> int | None:
    """Return the number of columns of a terminal; ``None`` if the stream is not a terminal."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return columns or 80


# --- words -----------------------------------------------------------------------------------------------


def size(count: int) -> str:
    """``1.5 MiB``."""
    number = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1000 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def span(value: timedelta | None) -> str:
    """``2h 5m``: the two largest units that are not zero."""
    if value is None:
        return "-"
    seconds = value.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10 and seconds % 1:
        return f"{seconds:.1f}s"
    left, parts = round(seconds), []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def lifetime(value: timedelta | None) -> str:
    """As `span`, but zero is ``none``, which means for ever, and ``None`` is ``-``, the server's default."""
    if value is None:
        return "-"
    return span(value) if value else "none"


def ago(value: datetime | None) -> str:
    """``3 minutes ago`` or ``in 2 hours``."""
    if value is None:
        return "-"
    seconds = (datetime.now(UTC) - value).total_seconds()
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        count = int(abs(seconds) / length + 0.1)  # "in 30 days" also a moment later
        if count:
            words = f"{count} {unit}{'s' if count > 1 else ''}"
            return f"{words} ago" if seconds > 0 else f"in {words}"
    return "now"


def pairs(mapping: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in mapping.items()) or "-"


# --- JSON ------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Convert a value of the SDK to JSON types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = (field.name for field in dataclasses.fields(value) if field.init)
        return {camel(name): plain(getattr(value, name)) for name in given}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON. Bytes of a file name that are not UTF-8 are escaped: a document must be UTF-8."""
    import json

    text = json.dumps(plain(value), indent=indent, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(plain(value), indent=indent)
    return text


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


# --- tables ----------------------------------------------------------------------------------------------


def columns_of(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int) -> str:
    """Shorten a text to at most that many columns."""
    if columns_of(text) <= width:
        return text
    kept = ""
    for character in text:
        if columns_of(kept + character) >= width:
            break
        kept += character
    return f"{kept}…"


def fitted(widths: Sequence[int], room: int) -> list[int]:
    """Make columns narrower if they do not fit, the widest first.

    The first column is a name or an id, which people type next: up to half of the width it is shortened last.
    Columns get too narrow to read only if nothing else is left.
    """
    found = list(widths)
    for first, others in ((max(room // 2, _NARROW), _NARROW), (_NARROW, _NARROW), (_NARROW, _NARROWEST)):
        while sum(found) > room:
            over = [width if width > (others if index else first) else 0 for index, width in enumerate(found)]
            if not any(over):
                break
            found[over.index(max(over))] -= 1
    return found


class Output:
    """Standard output, for people or for programs."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.colour = shows_colour(sys.stdout)

    def line(self, text: str = "") -> None:
        print(text)

    def json(self, value: Any) -> None:
        """Print one JSON document."""
        print(_json(value, indent=2))

    def record(self, value: Any) -> None:
        """Print one line of JSON of a stream."""
        print(_json(value), flush=True)

    def paint(self, text: str, style: str) -> str:
        return painted(text, style, colour=self.colour)

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print aligned columns, at most as wide as the terminal; not shortened if it is not a terminal."""
        cells = [[clean(cell) for cell in row] for row in rows]
        widths = [
            max(columns_of(row[index]) for row in [list(headers), *cells]) for index in range(len(headers))
        ]
        width = terminal_width(sys.stdout)
        if width is not None:
            widths = fitted(widths, width - 2 * (len(widths) - 1))
        head = self._row(headers, widths, lambda text, _: self.paint(text, "bold"))
        self.line(head)
        for row in cells:
            self.line(self._row(row, widths, self._by_status))

    def fields(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print names on the left and values on the right."""
        found = [(name, clean(value)) for name, value in rows]
        width = max(len(name) for name, _ in found)
        for name, value in found:
            self.line(f"{self.paint(f'{name:<{width}}', 'bold')}  {value}".rstrip())

    def _row(self, row: Sequence[str], widths: Sequence[int], style: Callable[[str, str], str]) -> str:
        parts = []
        for index, (text, width) in enumerate(zip(row, widths, strict=True)):
            shown = cut(text, width)
            last = index == len(widths) - 1
            parts.append(style(shown, text) + ("" if last else " " * (width - columns_of(shown))))
        return "  ".join(parts).rstrip()

    def _by_status(self, shown: str, text: str) -> str:
        return self.paint(shown, _STATUS_STYLES.get(text, ""))
