"""Naming, decoding and encoding of this package's structs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar, cast

import msgspec
from msgspec import Meta, UnsetType

from sandkeep.checks import refuse

MAX_SAFE = 2**53 - 1
"""The largest integer that every JSON parser keeps exact."""

Milliseconds = Annotated[int, Meta(ge=0, le=MAX_SAFE)]
Count = Annotated[int, Meta(ge=0, le=MAX_SAFE)]
Whole = Annotated[int, Meta(ge=-MAX_SAFE, le=MAX_SAFE)]

T = TypeVar("T")


class Body(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """Something a client sends. An absent field is ``UNSET``, to distinguish it from ``null``."""


class Object(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """Something a client receives. A field that is ``UNSET`` is left out."""


def known(**values: Any) -> dict[str, Any]:
    """Return the values that are not ``None``: keyword arguments for an object that omits the others."""
    return {name: value for name, value in values.items() if value is not None}


def given(value: T | UnsetType, default: T) -> T:
    """Return a field's value, or ``default`` if the client did not send it."""
    return default if isinstance(value, UnsetType) else value


_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
_MAKING = threading.Lock()


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder for ``kind``, made once.

    Only one thread at a time makes decoders: msgspec inspects a type when it first needs it, and threads that
    make it do so at the same moment crash the interpreter.
    """
    found = _DECODERS.get(kind)
    if found is None:
        with _MAKING:
            found = _DECODERS.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def parse(kind: type[T], data: bytes | bytearray | memoryview) -> T:
    """Parse JSON as ``kind``. ``\\udcXX`` in it stands for a byte that is not UTF-8, as in file names."""
    try:
        return decoder(kind).decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # msgspec accepts only complete surrogate pairs.
        if b"\\ud" not in bytes(data).lower():
            raise
        import json

        try:
            found = json.loads(bytes(data))
            json.dumps(found, ensure_ascii=False).encode(errors="surrogateescape")
        except (ValueError, RecursionError):
            pass  # invalid in another way, or lone surrogates that stand for no byte
        else:
            return msgspec.convert(found, kind)
        raise


def decode(kind: type[T], data: bytes | bytearray | memoryview) -> T:
    """Decode a request body. No body is an empty object: clients send ``stop`` and ``snapshot`` that way.

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
        refuse("", f"the request body is not valid JSON: {error}")


def convert(kind: type[T], parameters: Mapping[str, Sequence[str]]) -> T:
    """Decode a query string, each parameter as its field's type.

    A field that is a list has every value of a parameter that is repeated, other fields have the last one.
    """
    several = _repeated(cast(Hashable, kind))
    values = {name: found if name in several else found[-1] for name, found in parameters.items()}
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        _refuse_validation(error)


@functools.cache
def _repeated(kind: Hashable) -> frozenset[str]:
    """Return the parameters of a query string that may be repeated: the fields that are lists."""
    from msgspec import inspect  # which clients do without

    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return frozenset(each.encode_name for each in info.fields if isinstance(each.type, inspect.ListType))


def encode(value: Any, *, other: Callable[[Any], Any] | None = None) -> bytes:
    """Return JSON. What ``os.fsdecode`` makes of bytes that are not UTF-8 is written as ``\\udcXX``.

    Args:
        value: what to write.
        other: converts a value that JSON cannot represent.
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
