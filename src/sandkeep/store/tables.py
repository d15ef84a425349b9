"""Convert frozen rows to database tuples and back: one `RowTable` per row class, columns named like fields.

A field that is not plain text or a number names its codec in its metadata (`Codec.column`). This module does
not depend on the meaning of a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Generic, TypeVar

from sandkeep.store.database import Database
from sandkeep.store.pages import Page, PageRequest, Sort, read_cursor, write_cursor

Row = TypeVar("Row")

_REMEMBERED = 512
"""Decoded rows kept per table."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How one field is written to, and read from, its column. ``None`` is NULL in every codec."""

    encode: Callable[[Any], str | int | bytes]
    decode: Callable[[Any], Any]

    @property
    def column(self) -> dict[str, Codec]:
        """Return the metadata for a dataclass field stored this way."""
        return {"codec": self}


def _to_json(value: Any) -> str:
    # ASCII, so that text a database column cannot hold (lone surrogates, NUL) is preserved.
    return json.dumps(value, separators=(",", ":"))


BOOL = Codec(int, bool)
JSON = Codec(_to_json, json.loads)
TUPLE = Codec(_to_json, lambda text: tuple(json.loads(text)))


class Conditions:
    """``WHERE`` terms joined by ``AND``; every ``{}`` in a term becomes the number of a parameter."""

    def __init__(self, *values: Any) -> None:
        self.values: list[Any] = list(values)
        self._terms: list[str] = []

    def add(self, term: str, *values: Any) -> Conditions:
        first = len(self.values) + 1
        self._terms.append(term.format(*(f"${first + index}" for index in range(len(values)))))
        self.values += values
        return self

    def add_prefix(self, column: str, prefix: str) -> Conditions:
        """Match names starting with ``prefix``: they are ASCII, so everything up to DEL after it."""
        return self.add(f"{column} >= {{}} AND {column} < {{}}", prefix, prefix + "\x7f")

    @property
    def sql(self) -> str:
        return " AND ".join(self._terms) or "1 = 1"


class RowTable(Generic[Row]):
    """The statements that every noun needs, derived from the fields of its row class."""

    def __init__(self, name: str, row: type[Row]) -> None:
        self.name = name
        self._row = row
        self._fields = tuple(f.name for f in fields(row))  # type: ignore[arg-type]
        codecs = [f.metadata.get("codec") for f in fields(row)]  # type: ignore[arg-type]
        self._codecs: dict[str, Codec] = {n: c for n, c in zip(self._fields, codecs, strict=True) if c}
        self._decoders = tuple((i, c.decode) for i, c in enumerate(codecs) if c)
        self.columns = ", ".join(f"{name}.{column}" for column in self._fields)
        numbers = ", ".join(f"${index + 1}" for index in range(len(self._fields)))
        # The same rows are read repeatedly; they are frozen, so readers can share one object.
        self.decode: Callable[[tuple[Any, ...]], Row] = lru_cache(maxsize=_REMEMBERED)(self._decode)
        self._finds: dict[str, str] = {}
        """Statements of ``find`` by term. Terms are literals in the code, so their number is bounded."""
        self._insert = f"INSERT INTO {name} ({', '.join(self._fields)}) VALUES ({numbers})"

    def _decode(self, values: tuple[Any, ...]) -> Row:
        row = list(values)
        for index, decode in self._decoders:
            if row[index] is not None:
                row[index] = decode(row[index])
        return self._row(**dict(zip(self._fields, row, strict=True)))

    def encode(self, name: str, value: Any) -> Any:
        codec = self._codecs.get(name)
        return value if codec is None or value is None else codec.encode(value)

    def insert(self, db: Database, row: Row) -> None:
        db.run(self._insert, *(self.encode(name, getattr(row, name)) for name in self._fields))

    def find(self, db: Database, term: str, *values: Any) -> Row | None:
        sql = self._finds.get(term)
        if sql is None:
            where = Conditions().add(term, *values)
            sql = self._finds[term] = f"SELECT {self.columns} FROM {self.name} WHERE {where.sql}"
        found = db.one(sql, *values)
        return None if found is None else self.decode(found)

    def select(self, db: Database, term: str, *values: Any, order: str) -> list[Row]:
        where = Conditions().add(term, *values)
        sql = f"SELECT {self.columns} FROM {self.name} WHERE {where.sql} ORDER BY {order}"
        return [self.decode(found) for found in db.all(sql, *where.values)]

    def update(self, db: Database, changes: Mapping[str, Any], term: str, *values: Any) -> Row | None:
        """Change the one row that the term selects and return it; ``None`` when there is none."""
        unknown = changes.keys() - set(self._fields)
        if unknown:
            raise TypeError(f"{self.name} has no column {', '.join(sorted(unknown))}")
        where = Conditions(*(self.encode(name, value) for name, value in changes.items()))
        assigned = ", ".join(f"{name} = ${index + 1}" for index, name in enumerate(changes))
        where.add(term, *values)
        found = db.one(
            f"UPDATE {self.name} SET {assigned} WHERE {where.sql} RETURNING {', '.join(self._fields)}",
            *where.values,
        )
        return None if found is None else self.decode(found)

    def page(self, db: Database, where: Conditions, sort: Sort, request: PageRequest) -> Page[Row]:
        """Return one page in the order of ``sort``, ties broken by id, from the request's cursor on."""
        after = read_cursor(request, sort)
        descending = request.order == "desc"
        if after is not None:
            sign = "<" if descending else ">"
            where.add(f"({sort.column}, {self.name}.id) {sign} ({{}}, {{}})", *after)
        way = "DESC" if descending else "ASC"
        # One row more than requested shows whether another page follows.
        found = db.all(
            f"SELECT {self.columns}, {sort.column} FROM {self.name} WHERE {where.sql}"
            f" ORDER BY {sort.column} {way}, {self.name}.id {way} LIMIT {request.limit + 1}",
            *where.values,
        )
        shown = found[: request.limit]
        items = tuple(self.decode(values[:-1]) for values in shown)
        more = len(found) > request.limit
        last_id = self._fields.index("id")
        return Page(items, write_cursor(request, sort, shown[-1][-1], shown[-1][last_id]) if more else None)
