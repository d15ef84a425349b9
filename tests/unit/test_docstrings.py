"""Whatever is public says what it is: names of the package, its errors, their methods and properties."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import sandkeep
from sandkeep import errors, sync


def public() -> Iterator[tuple[str, Any]]:
    for module in (sandkeep, sync):
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)
    for name, value in vars(errors).items():
        if not name.startswith("_") and getattr(value, "__module__", None) == errors.__name__:
            yield f"{errors.__name__}.{name}", value


def documented() -> Iterator[tuple[str, Any]]:
    """Each public class and function, and each public method of a class, its own or inherited from us."""
    for name, value in public():
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            yield name, value
            for owner in value.__mro__:
                if not owner.__module__.startswith("sandkeep"):
                    continue
                for member, found in vars(owner).items():
                    inner = found.__func__ if isinstance(found, classmethod | staticmethod) else found
                    if not member.startswith("_") and (
                        inspect.isfunction(inner) or isinstance(inner, property)
                    ):
                        yield f"{name}.{member}", inner


def test_everything_public_has_a_docstring_of_its_own() -> None:
    # ``dataclass`` writes a signature where there is none, and a class has no other's docstring.
    missing = []
    for name, value in documented():
        text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        if not (text or "").strip() or str(text).startswith(f"{name.rpartition('.')[2]}("):
            missing.append(name)
    assert not missing


def test_facts_that_the_tree_of_errors_names_are_there() -> None:
    """Each error has, as an attribute, the facts written beside it; a server may have left out some."""
    assert errors.TimeoutInvalid("x", maximum_ms=90_000).maximum.total_seconds() == 90  # type: ignore[union-attr]
    assert errors.TimeoutInvalid("x").maximum is None
    assert errors.SnapshotGone("x", kind="snapshot", name="snap_1").snapshot == "snap_1"
    assert errors.ArchiveError("x", path="a/b").path == "a/b"
    assert errors.ArchiveError("x").path is None
