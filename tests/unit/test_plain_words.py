"""Text names who acts: the worst habits are counted, and the counts may only fall.

Counted are words that hide which component acts ("whoever", "somebody", …) and "is no X" instead of "is not
an X", in docstrings, comments and strings of the sources and in the text of the documentation. Code in the
documentation, such as names of tests, is left out.
"""

from __future__ import annotations

import io
import re
import token
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src/sandkeep"

# "there is no X" and "is no longer" are plain; "nobody:" is a row of a passwd file.
HABITS = re.compile(
    r"\b(whoever|whatever|somebody|anybody|everybody|nobody(?!:))\b|(?<!there )\bis no (?!longer\b|more\b)",
    re.IGNORECASE,
)
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
TEXT = {token.STRING, token.COMMENT, getattr(token, "FSTRING_MIDDLE", token.COMMENT)}

# Most hits per directory; a directory that is not listed has none. Lower a number whenever it falls.
ALLOWED = {
    "*.md": 4,
    "docs": 11,
    "docs/design": 2,
    "engine": 1,
    "server/routes": 1,
}


def text_of(path: Path) -> Iterator[str]:
    for found in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if found.type in TEXT:
            yield found.string


def counted() -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        place = path.parent.relative_to(SOURCE).as_posix()
        if place.split("/")[0] != "sync":  # generated from sdk/_async
            counts[place] += sum(len(HABITS.findall(text)) for text in text_of(path))
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        place = path.parent.relative_to(ROOT).as_posix().replace(".", "*.md")
        counts[place] += len(HABITS.findall(CODE.sub("", path.read_text())))
    return +counts


def test_the_worst_habits_do_not_come_back() -> None:
    counts = counted()
    risen = {place: count for place, count in counts.items() if count > ALLOWED.get(place, 0)}
    assert not risen, f"name the component that acts (server, supervisor, caller, …): {risen}"


def test_the_table_follows_the_counts() -> None:
    counts = counted()
    fallen = {place: counts[place] for place, allowed in ALLOWED.items() if counts[place] < allowed}
    assert not fallen, f"lower ALLOWED to {fallen}"


def test_every_habit_is_found() -> None:
    hits = "Whoever asks; nobody; somebody's; whatever it is; it is no file; anybody, everybody"
    assert len(HABITS.findall(hits)) == 7
    assert not HABITS.findall("there is no file; it is no longer here; nobody:x:65534")
