"""``dataclass`` for frozen values with slots, at a tenth of what ``dataclasses.dataclass`` costs at import.

``dataclasses`` compiles six methods per class, which takes 0.4 ms in Python 3.11. The SDK has sixty such
classes, of which a program uses a few. Here all classes share the methods but ``__init__``, which is compiled
when it is first looked up. Otherwise they are the dataclasses that type checkers see: ``fields``, ``asdict``,
``replace``, ``match`` and pickling work.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, FrozenInstanceError, fields

TYPE_CHECKING = False  # see sandkeep/__init__.py

if TYPE_CHECKING:
    from dataclasses import dataclass
    from typing import Any, NoReturn

__all__ = ["dataclass"]


class _Factory:
    """The default of a parameter whose field has a factory."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


class _Init:
    """Stands for ``__init__`` of a class until that is looked up."""

    __slots__ = ("_cls",)

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        init = _compile_init(self._cls)
        self._cls.__init__ = init  # type: ignore[misc]
        return init.__get__(instance, owner)


def _compile_init(cls: Any) -> Any:
    scope: dict[str, Any] = {"_FACTORY": _FACTORY, "_set": object.__setattr__}
    positional: list[str] = []
    keyword: list[str] = []
    lines: list[str] = []
    for field in fields(cls):
        name = parameter = value = field.name
        if field.default is not MISSING:
            scope[f"_default_{name}"] = field.default
            parameter = f"{name}=_default_{name}"
        elif field.default_factory is not MISSING:
            scope[f"_make_{name}"] = field.default_factory
            parameter = f"{name}=_FACTORY"
            value = f"_make_{name}() if {name} is _FACTORY else {name}"
        (keyword if field.kw_only else positional).append(parameter)
        lines.append(f"  _set(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append("  self.__post_init__()")
    parameters = ", ".join(["self", *positional, *(["*", *keyword] if keyword else [])])
    exec("\n".join([f"def __init__({parameters}):", *lines, "  return"]), scope)
    init = scope["__init__"]
    init.__module__, init.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    init.__annotations__ = {**{field.name: field.type for field in fields(cls)}, "return": None}
    return init


def _repr(self: Any) -> str:
    shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr)
    return f"{type(self).__qualname__}({shown})"


def _compared(self: Any) -> tuple[object, ...]:
    return tuple(getattr(self, field.name) for field in fields(self) if field.compare)


def _eq(self: Any, other: object) -> bool:
    return _compared(self) == _compared(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _set(self: Any, name: str, value: object) -> None:
    if name in self.__dataclass_fields__:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delete(_: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _get_state(self: Any) -> list[object]:
    return [getattr(self, field.name) for field in fields(self)]


def _set_state(self: Any, state: list[object]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


_SHARED = {
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _set,
    "__delattr__": _delete,
    "__getstate__": _get_state,
    "__setstate__": _set_state,
}

if not TYPE_CHECKING:

    def dataclass(*, frozen, slots, kw_only=False, init=True):
        """Return a decorator for a frozen class with slots; it does nothing else that ``dataclasses`` can."""
        assert frozen and slots

        def decorate(cls):
            cls.__doc__ = cls.__doc__ or cls.__name__  # dataclasses would compute a signature
            cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
            for name, method in _SHARED.items():
                if name not in vars(cls):
                    setattr(cls, name, method)
            if init:
                cls.__init__ = _Init(cls)
            return cls

        return decorate
