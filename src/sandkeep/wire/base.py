"""How structs of this package are spelled, decoded and encoded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta, UnsetType

from sandkeep.types import refuse

MAX_SAFE = 2**53 - 1
"""The largest integer every JSON reader keeps exact."""

Milliseconds = Annotated[int, Meta(ge=0, le=MAX_SAFE)]
Count = Annotated[int, Meta(ge=0, le=MAX_SAFE)]
Whole = Annotated[int, Meta(ge=-MAX_SAFE, le=MAX_SAFE)]

T = TypeVar("T")


class Body(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """Something a client sends. An absent field is ``UNSET``, so that it can be told from ``null``."""


class Object(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """Something a client receives. A field that is ``UNSET`` is left out."""


def known(**values: Any) -> dict[str, Any]:
    """The values that are not ``None``: keyword arguments for an object whose other fields are left out."""
    return {name: value for name, value in values.items() if value is not None}


def given(value: T | UnsetType, default: T) -> T:
    """A field's value, or what it means when the client did not send it."""
    return default if isinstance(value, UnsetType) else value


_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
_MAKING = threading.Lock()


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """What reads JSON as ``kind``, made once.

    One at a time: msgspec looks into a type when it first needs it, and threads that make it do so at the
    same moment crash the interpreter.
    """
    found = _DECODERS.get(kind)
    if found is None:
        with _MAKING:
            found = _DECODERS.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def parse(kind: type[T], data: bytes | bytearray | memoryview) -> T:
    """JSON as ``kind``. ``\\udcXX`` in it stands for a byte that is no text, as in names of files."""
    try:
        return decoder(kind).decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # msgspec knows whole surrogate pairs only.
        if b"\\ud" not in bytes(data).lower():
            raise
        import json

        try:
            found = json.loads(bytes(data))
            json.dumps(found, ensure_ascii=False).encode(errors="surrogateescape")
        except (ValueError, RecursionError):
            pass  # broken in other ways, or halves of pairs that stand for nothing
        else:
            return msgspec.convert(found, kind)
        raise


def decode(kind: type[T], data: bytes | bytearray | memoryview) -> T:
    """A request body. None at all is an empty object: clients send ``stop`` and ``snapshot`` that way.

    Raises:
        InvalidRequest: with the path of the field in the client's own spelling.
    """
    if not bytes(data[:64]).strip() and not bytes(data).strip():
        data = b"{}"
    try:
        return parse(kind, data)
    except msgspec.ValidationError as error:
        _refuse_validation(error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        refuse("", f"the body is not JSON: {error}")


def convert(kind: type[T], parameters: dict[str, str]) -> T:
    """The parameters of a query string, each read as its field's type."""
    try:
        return msgspec.convert(parameters, kind, strict=False)
    except msgspec.ValidationError as error:
        _refuse_validation(error)


def encode(value: Any, *, other: Callable[[Any], Any] | None = None) -> bytes:
    """JSON. What ``os.fsdecode`` makes of bytes that are no text is written as ``\\udcXX``.

    Args:
        value: what to write.
        other: turns what JSON has no way to write into something it has.
    """
    try:
        return msgspec.json.encode(value, enc_hook=other)
    except UnicodeEncodeError:
        import json

        return json.dumps(msgspec.to_builtins(value, enc_hook=other), separators=(",", ":")).encode()


def _refuse_validation(error: msgspec.ValidationError) -> NoReturn:
    # msgspec says "<problem> - at `$.ports[0]`"; the path is only in the text.
    problem, separator, path = str(error).partition(" - at `")
    path = path.rstrip("`").removeprefix("$").removeprefix(".") if separator else ""
    before, missing, name = problem.partition("Object missing required field `")
    if missing and not before:
        refuse(f"{path}.{name}".strip(".`"), "is required")
    refuse(path, problem[:1].lower() + problem[1:])
