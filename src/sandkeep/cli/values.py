"""click types for durations, pairs, mounts, sizes and ports: parsed once, then trusted."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from sandkeep.errors import InvalidRequest
from sandkeep.spec import HostPort, Mount
from sandkeep.states import MountMode

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType

_UNITS: Final = {
    "ms": 0.001,
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "m": 60.0,
    "min": 60.0,
    "minute": 60.0,
    "h": 3600.0,
    "hour": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
    "w": 604800.0,
    "week": 604800.0,
    "y": 31536000.0,
    "year": 31536000.0,
}
NONE: Final = "none"
_SIZES: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?")


class DurationType(_ParamType):
    """``30s``, ``5m``, ``1h30m``; with ``zero`` also ``none`` and ``0``, which mean for ever."""

    name = "duration"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "DURATION|none" if self._zero else "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        text = str(value).strip().lower()
        if self._zero and text in ("none", "0"):
            return timedelta()
        seconds, at = 0.0, 0
        for found in _DURATION.finditer(text):
            unit = found[2] if found[2] in _UNITS else found[2].removesuffix("s")
            if text[at : found.start()].strip() or unit not in _UNITS:
                break
            seconds += float(found[1]) * _UNITS[unit]
            at = found.end()
        if not seconds or text[at:].strip():
            more = ", or none" if self._zero else ""
            bare = f" ({text}s or {text}m?)" if text.replace(".", "").isdigit() else ""
            self.fail(f"{value!r} is not a duration{bare}: write 30s, 5m, 2h or 7d{more}", param, ctx)
        return timedelta(seconds=seconds)


class PairType(_ParamType):
    """``KEY=VALUE``. With ``environment``, ``KEY`` alone takes the value of the local variable."""

    name = "pair"

    def __init__(self, *, environment: bool = False) -> None:
        self._environment = environment

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "KEY=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, content = str(value).partition("=")
        if not equals and self._environment:
            import os

            if key in os.environ:
                return key, os.environ[key]
            self.fail(f"{value!r} is not KEY=VALUE, and no local variable {key} is set", param, ctx)
        if not equals or not key:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        return key, content


class MountType(_ParamType):
    """``DRIVE:/PATH`` or ``DRIVE:/PATH:MODE``."""

    name = "mount"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "DRIVE:PATH[:MODE]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Mount]:
        if isinstance(value, tuple):
            return value
        drive, _, rest = str(value).partition(":")
        path, _, mode = rest.partition(":")
        modes = [known.value for known in MountMode]
        if not drive or not path.startswith("/") or (mode and mode not in modes):
            self.fail(f"{value!r} is not DRIVE:/PATH[:{'|'.join(modes)}]", param, ctx)
        return path, Mount(drive, MountMode(mode) if mode else MountMode.READ_WRITE)


class HostPortType(_ParamType):
    """``PORT=NAME``; ``none`` is ``None``."""

    name = "host port"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "PORT=NAME"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> HostPort | None:
        if isinstance(value, HostPort) or value == "none":
            return None if value == "none" else value
        number, equals, name = str(value).partition("=")
        if not equals or not number.isdecimal():
            self.fail(f"{value!r} is not PORT=NAME, such as 8000=model.internal", param, ctx)
        try:
            return HostPort(int(number), name)
        except InvalidRequest as error:
            self.fail(f"{value!r}: {error.message}", param, ctx)


class ForwardType(_ParamType):
    """``LOCAL:REMOTE``, or ``REMOTE`` for the same port here; a ``LOCAL`` of 0 or none is any free port."""

    name = "forward"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "[LOCAL:]REMOTE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        local, colon, remote = str(value).rpartition(":")
        found = [remote if not colon else local or "0", remote]
        if not all(part.isdecimal() and int(part) <= 65535 for part in found) or int(remote) == 0:
            self.fail(f"{value!r} is not LOCAL:REMOTE or REMOTE, such as 8080:3000", param, ctx)
        return int(found[0]), int(found[1])


class NumberType(_ParamType):
    """A whole number, within bounds if they are given."""

    name = "number"

    def __init__(self, least: int | None = None, most: int | None = None) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)
        if self._least is not None and number < self._least:
            more = "" if self._most is None else f" and at most {self._most}"
            self.fail(f"must be at least {self._least}{more}", param, ctx)
        if self._most is not None and number > self._most:
            self.fail(f"must be at most {self._most}", param, ctx)
        return number


class SizeType(_ParamType):
    """Bytes, with ``K``, ``M``, ``G`` or ``T`` for powers of 1024."""

    name = "size"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "BYTES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value).strip().lower())
        if found is None:
            self.fail(f"{value!r} is not a size: write 500M or 10G", param, ctx)
        return int(float(found[1]) * _SIZES[found[2]])


class MegabytesType(SizeType):
    """Megabytes, or a size with ``M``, ``G`` or ``T`` for powers of 1024, rounded up to a megabyte."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "MB|SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip()
        return int(text) if text.isdecimal() else -(-super().convert(value, param, ctx) // (1 << 20))


class CpusType(_ParamType):
    """A number of processors, also parts of one."""

    name = "cpus"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number: write 2 or 0.5", param, ctx)


class OrNoneType(_ParamType):
    """What another type takes, or ``none``."""

    name = "value"

    def __init__(self, kind: click.ParamType[Any]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return NONE if str(value).lower() == NONE else self._kind.convert(value, param, ctx)


class TruthType(_ParamType):
    """``true`` or ``false``."""

    name = "truth"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "true|false"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() not in ("true", "false"):
            self.fail(f"{value!r} is neither true nor false", param, ctx)
        return str(value).lower() == "true"


class MomentType(_ParamType):
    """A time in ISO 8601, local unless it names a zone; or a duration, which means so long ago."""

    name = "moment"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "TIME|DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            return datetime.fromisoformat(str(value).strip()).astimezone()
        except (ValueError, OverflowError):
            pass
        try:
            return datetime.now().astimezone() - DURATION.convert(value, param, ctx)
        except (click.BadParameter, OverflowError):
            self.fail(
                f"{value!r} is neither a time nor a duration: write 2030-01-31T12:00, 30s or 2h", param, ctx
            )


DURATION: Final = DurationType()
LIFETIME: Final = DurationType(zero=True)
TAG: Final = PairType()
VARIABLE: Final = PairType(environment=True)
FORWARD: Final = ForwardType()
HOST_PORT: Final = HostPortType()
MOUNT: Final = MountType()
SIZE: Final = SizeType()
MEGABYTES: Final = MegabytesType()
CPUS: Final = CpusType()
TRUTH: Final = TruthType()
NUMBER: Final = NumberType()
MOMENT: Final = MomentType()
PORT: Final = NumberType(1, 65535)
