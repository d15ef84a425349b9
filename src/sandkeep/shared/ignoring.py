"""Patterns of files to leave out, in the syntax of ``.gitignore``. The client and the supervisor share them.

- Blank lines and lines that begin with ``#`` are not patterns. ``\\`` takes the next character literally;
  spaces at the end are dropped unless they are escaped.
- ``*`` stands for any part of a name, ``?`` for one character, ``[a-z]`` and ``[!a-z]`` for one of a set.
- A pattern without ``/``, or with one at its end only, matches a name at any depth. Any other matches a whole
  path from the top of the tree; ``**/``, ``/**/`` and ``/**`` stand for any number of directories.
- ``/`` at the end: directories only. ``!`` at the beginning: do not leave it out after all. The last pattern
  that matches decides. What is below a directory that is left out stays left out.

Classes such as ``[[:alpha:]]`` are refused, and ``.gitignore`` files inside the tree are not read.

Names are matched without backtracking over more than one ``*``: a request cannot make the supervisor slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from sandkeep.errors import InvalidRequest


class _Wildcard:
    """``*`` or ``?`` of a name."""


class _Set(NamedTuple):
    """``[…]`` of a name."""

    negated: bool
    ranges: tuple[tuple[str, str], ...]


_Token = str | _Wildcard | _Set
_Name = Callable[[str], bool]
"""Whether a name matches one part of a pattern."""

_STAR: Final = _Wildcard()
_ONE: Final = _Wildcard()


class _Pattern(NamedTuple):
    negated: bool
    directories: bool
    """Matches directories only."""
    name: _Name | None
    """Matches the last name; ``None`` if the pattern is about whole paths."""
    parts: tuple[_Name | None, ...]
    """``None`` stands for ``**``."""


class Ignore:
    """A list of patterns, compiled."""

    def __init__(self, patterns: Iterable[str]) -> None:
        found = (_pattern(number, text) for number, text in enumerate(patterns))
        self._patterns = [pattern for pattern in found if pattern is not None][::-1]

    def __call__(self, path: str, *, directory: bool) -> bool:
        """Return whether to leave out a path, relative to the tree, whose directories are not left out."""
        for pattern in self._patterns:
            if pattern.directories and not directory:
                continue
            if pattern.name is not None:
                matches = pattern.name(path.rpartition("/")[2])
            else:
                matches = _match_path(path.split("/"), pattern.parts)
            if matches:
                return not pattern.negated
        return False


def _pattern(number: int, text: str) -> _Pattern | None:
    rest = _without_spaces(text.rstrip("\r\n"))
    if not rest or rest.startswith("#"):
        return None
    negated = rest.startswith("!")
    rest = rest.removeprefix("!")
    directories = rest.endswith("/")
    rest = rest.rstrip("/")
    parts = [part for part in rest.split("/") if part]
    if not parts:
        return None  # "/" alone matches nothing, as in git
    try:
        if "/" not in rest and parts != ["**"]:
            return _Pattern(negated, directories, _name(parts[0]), ())
        if parts[-1] == "**":
            parts[-1:] = ["*", "**"]  # what is below a directory, not the directory itself
        compiled = tuple(None if part == "**" else _name(part) for part in parts)
    except ValueError as error:
        raise InvalidRequest(
            f"ignore: pattern {text!r} {error}", field=f"ignore[{number}]", problem=str(error)
        ) from None
    return _Pattern(negated, directories, None, compiled)


def _without_spaces(text: str) -> str:
    """Return a pattern without the spaces at its end that no backslash protects."""
    while text.endswith(" "):
        shorter = text[:-1]
        if (len(shorter) - len(shorter.rstrip("\\"))) % 2:
            break
        text = shorter
    return text


def _name(text: str) -> _Name:
    tokens = _tokens(text)
    if all(isinstance(token, str) for token in tokens):
        literal = "".join(str(token) for token in tokens)
        return lambda name: name == literal
    if all(token is _STAR or isinstance(token, str) for token in tokens):
        pieces = [""]
        for token in tokens:
            if isinstance(token, str):
                pieces[-1] += token
            else:
                pieces.append("")
        return partial(_match_pieces, pieces)
    return partial(_match_tokens, tokens)


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "\\":
            if at == len(text):
                raise ValueError("ends with a backslash")
            tokens.append(text[at])
            at += 1
        elif char == "*":
            if tokens[-1:] != [_STAR]:
                tokens.append(_STAR)
        elif char == "?":
            tokens.append(_ONE)
        elif char == "[":
            found, at = _set(text, at)
            tokens.append(found)
        else:
            tokens.append(char)
    return tokens


def _set(text: str, at: int) -> tuple[_Set, int]:
    """Parse what follows ``[``; return it and the position after ``]``."""
    negated = text[at : at + 1] in ("!", "^")
    at += negated
    chars: list[tuple[str, bool]] = []
    while at < len(text) and (text[at] != "]" or not chars):
        if text.startswith("[:", at):
            raise ValueError("has a class such as [:alpha:], which is not supported")
        escaped = text[at] == "\\" and at + 1 < len(text)
        at += escaped
        chars.append((text[at], text[at] == "-" and not escaped))
        at += 1
    if at == len(text):
        raise ValueError("has a [ without its ]")
    ranges: list[tuple[str, str]] = []
    index = 0
    while index < len(chars):
        low = high = chars[index][0]
        if index + 2 < len(chars) and chars[index + 1][1]:
            high = chars[index + 2][0]
            index += 2
        ranges.append((low, high))
        index += 1
    return _Set(negated, tuple(ranges)), at + 1


def _match_pieces(pieces: Sequence[str], name: str) -> bool:
    """Return whether ``name`` is these literals with anything in between."""
    first, *middle, last = pieces
    if len(name) < len(first) + len(last) or not (name.startswith(first) and name.endswith(last)):
        return False
    at, end = len(first), len(name) - len(last)
    for piece in middle:
        found = name.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


def _match_tokens(tokens: Sequence[_Token], name: str) -> bool:
    at = token = 0
    star, resume = -1, 0
    while at < len(name):
        if token < len(tokens) and tokens[token] is _STAR:
            star, resume = token, at
            token += 1
        elif token < len(tokens) and _match_one(tokens[token], name[at]):
            at += 1
            token += 1
        elif star >= 0:
            # Only the last star has to grow: what an earlier one matched stays the shortest.
            resume += 1
            at, token = resume, star + 1
        else:
            return False
    return all(rest is _STAR for rest in tokens[token:])


def _match_one(token: _Token, char: str) -> bool:
    if isinstance(token, _Set):
        return token.negated != any(low <= char <= high for low, high in token.ranges)
    return token is _ONE or token == char


def _match_path(names: Sequence[str], parts: Sequence[_Name | None]) -> bool:
    at = part = 0
    star, resume = -1, 0
    while at < len(names):
        matches = parts[part] if part < len(parts) else None
        if part < len(parts) and matches is None:
            star, resume = part, at
            part += 1
        elif matches is not None and matches(names[at]):
            at += 1
            part += 1
        elif star >= 0:
            resume += 1
            at, part = resume, star + 1
        else:
            return False
    return all(rest is None for rest in parts[part:])
