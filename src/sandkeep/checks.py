"""Checks that values run once, when they are built.

A check that fails raises :class:`~sandkeep.errors.InvalidRequest`: its ``field`` is the path of the offending
part (``env["A=B"]``), its ``problem`` says what is wrong with it. Parsers that few checks need
(``ipaddress``, ``urllib.parse``) are imported by those checks, because every client imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

from sandkeep.errors import InvalidRequest

MAX_NAME_LENGTH = 128
MAX_DURATION = timedelta(days=3653)
MAX_METADATA = 32
MAX_METADATA_KEY = 64
MAX_METADATA_BYTES = 4096
"""Of keys and values together: lists of processes show all of it."""
RESERVED_NAMES = frozenset({"sessions", "snapshots", "drives"})
"""Words that follow ``/v2/sandboxes/`` in a route, so they cannot be names of sandboxes."""
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


def refuse(field_path: str, problem: str) -> NoReturn:
    """Raise ``InvalidRequest`` for a field."""
    message = f"{field_path}: {problem}" if field_path else problem
    raise InvalidRequest(message, field=field_path, problem=problem)


@contextmanager
def within(prefix: str) -> Iterator[None]:
    """Put ``prefix`` before the field of any ``InvalidRequest`` raised in the block."""
    try:
        yield
    except InvalidRequest as error:
        inner = error.details.get("field", "")
        joined = f"{prefix}{inner}" if not inner or inner.startswith("[") else f"{prefix}.{inner}"
        message = f"{joined}: {error.details.get('problem', error.message)}"
        details = {**error.details, "field": joined}
        raise InvalidRequest(message, hint=error.hint, **details) from None


def expect(field_path: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Refuse a value of the wrong type; ``True`` and ``False`` are not accepted as numbers."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        refuse(field_path, f"must be {what}, not {type(value).__name__}")


def duration(value: timedelta | float, field_path: str = "duration") -> timedelta:
    """Return a duration given as a ``timedelta`` or as seconds."""
    if isinstance(value, timedelta):
        return value
    expect(field_path, value, (int, float), "a timedelta or a number of seconds")
    try:
        return timedelta(seconds=value)
    except (OverflowError, ValueError):
        refuse(field_path, f"{value} seconds is not a valid duration")


def milliseconds(value: timedelta) -> int:
    """Return whole milliseconds, rounded down."""
    return value // timedelta(milliseconds=1)


def byte_length(field_path: str, text: str) -> int:
    """Return how many bytes the kernel gets; ``\\udcXX`` in the text stands for a byte that is not UTF-8."""
    try:
        return len(text.encode(errors="surrogateescape"))
    except UnicodeEncodeError:
        refuse(field_path, "contains a lone surrogate")


def check_name(name: str, *, field_path: str = "name", reserved: frozenset[str] = RESERVED_NAMES) -> str:
    """Return the name if it is valid as one path segment in URLs and file systems."""
    expect(field_path, name, str, "text")
    if not name:
        refuse(field_path, "must not be empty")
    if len(name) > MAX_NAME_LENGTH:
        refuse(field_path, f"must have at most {MAX_NAME_LENGTH} characters, not {len(name)}")
    if wrong := set(name) - _NAME_CHARACTERS:
        refuse(field_path, f"may contain only letters, digits, '-' and '_', not {min(wrong)!r}")
    if name in reserved:
        refuse(field_path, f"{name!r} is a reserved word")
    return name


def check_duration(field_path: str, value: timedelta, *, zero: bool = False) -> None:
    expect(field_path, value, timedelta, "a timedelta")
    smallest = timedelta(0) if zero else timedelta(milliseconds=1)
    if not smallest <= value <= MAX_DURATION:
        refuse(field_path, f"must be between {smallest} and {MAX_DURATION.days} days, not {value}")


def check_text(field_path: str, value: str, *, limit: int, empty: bool = False) -> None:
    expect(field_path, value, str, "text")
    if not value and not empty:
        refuse(field_path, "must not be empty")
    if len(value) > limit:
        refuse(field_path, f"must have at most {limit} characters, not {len(value)}")
    if not value.isprintable():
        refuse(field_path, "must not contain control characters")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Check what a caller notes about a process."""
    expect("metadata", metadata, Mapping, "a mapping of keys to values")
    if len(metadata) > MAX_METADATA:
        refuse("metadata", f"at most {MAX_METADATA} entries are allowed, not {len(metadata)}")
    total = 0
    for key, value in metadata.items():
        path = f'metadata["{key}"]'
        check_text(path, key, limit=MAX_METADATA_KEY)
        if ":" in key:
            refuse(path, "must not contain ':', which separates key and value in searches")
        expect(path, value, str, "text")
        if "\0" in value:
            refuse(path, "must not contain a NUL character")
        total += _utf8_length(path, key) + _utf8_length(path, value)
    if total > MAX_METADATA_BYTES:
        refuse("metadata", f"must be at most {MAX_METADATA_BYTES} bytes in total, not {total}")


def _utf8_length(field_path: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        refuse(field_path, "contains a lone surrogate")


def check_url(field_path: str, url: str, schemes: Iterable[str], *, bare: bool = False) -> None:
    from urllib.parse import urlsplit

    check_text(field_path, url, limit=4096)
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        refuse(field_path, "is not a URL")
    if parts.scheme not in schemes or not parts.hostname:
        refuse(field_path, f"must be a URL with scheme {' or '.join(sorted(schemes))}")
    if bare and (parts.query or parts.fragment):
        refuse(field_path, "must not have a query string or a fragment")
