"""Check the values of settings when a server starts.

A server that starts with an unusable value cannot serve anything, and reports errors to callers who did not
cause them. So each value is checked here, and the error names the setting. Conditions beyond the value, such
as whether an image exists, are reported by ``/health``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address, ip_network
from typing import Any, Final
from urllib.parse import urlsplit

from sandkeep.engine.settings import NetworkSettings, Settings
from sandkeep.host.native.boot import OPTIONAL

_HOSTNAME: Final = re.compile(r"(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)(\.[a-z0-9_-]{1,63})*")
_PORTS: Final = 65_535

Check = Callable[[Any], str | None]
"""Returns what is wrong with a value; ``None`` if nothing is."""


def problems(settings: Settings) -> list[str]:
    """Return what is unusable, each text beginning with the name of its setting."""
    found = _problems_of(settings, _SETTINGS)
    return found + [f"network.{each}" for each in _problems_of(settings.network, _NETWORK)]


def _problems_of(settings: Settings | NetworkSettings, checks: Mapping[str, Check]) -> list[str]:
    found = []
    for name, check in checks.items():
        problem = check(getattr(settings, name))
        if problem is not None:
            found.append(f"{name} {problem}")
    return found


def _number(least: float, most: float | None = None) -> Check:
    def check(value: float | None) -> str | None:
        if value is None or (value >= least and (most is None or value <= most)):
            return None
        return f"is {value}; it must be at least {least}" + (f" and at most {most}" if most else "")

    return check


def _each(check: Check) -> Check:
    def check_all(values: Iterable[Any]) -> str | None:
        return next((problem for value in values if (problem := check(value)) is not None), None)

    return check_all


def _among(known: frozenset[str]) -> Check:
    def check(values: Iterable[str]) -> str | None:
        unknown = sorted(set(values) - known)
        return f"has {unknown[0]!r}; known: {', '.join(sorted(known))}" if unknown else None

    return check


def _image(value: str) -> str | None:
    return (
        None
        if value and value == value.strip() and len(value) <= 512
        else f"has {value!r}, which names no image"
    )


def _images(values: Mapping[str, str]) -> str | None:
    return _each(_image)((*values, *values.values()))


def _range(value: str) -> str | None:
    try:
        ip_network(value, strict=False)
    except ValueError as error:
        return f"has {value!r}, which is not a range of addresses: {error}"
    return None


def _address(value: str) -> str | None:
    try:
        ip_address(value)
    except ValueError:
        return f"has {value!r}, which is not an address"
    return None


def _name_server(value: str) -> str | None:
    address, mark, port = value.partition("#")
    if mark and not (port.isascii() and port.isdigit() and 1 <= int(port) <= _PORTS):
        return f"has {value!r}, whose port is none"
    return _address(address)


def _names(values: Mapping[str, Iterable[str]]) -> str | None:
    for name, addresses in values.items():
        problem = _domain(name) or _each(_address)(addresses)
        if problem is not None:
            return problem
    return None


def _domain(value: str | None) -> str | None:
    if value is None or _HOSTNAME.fullmatch(value.lower()):
        return None
    return f"has {value!r}, which is not a domain name, such as sandboxes.example.org"


def _certificates(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        return f"has {path!r}, which cannot be read: {os.strerror(error.errno or 0)}"
    return None if b"-----BEGIN CERTIFICATE-----" in text else f"has {path!r}, which has no certificate in it"


def _registry(value: str) -> str | None:
    host, mark, port = value.rpartition(":")
    if not mark or "]" in port:
        host, port = value, "1"
    bare = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    if port.isascii() and port.isdigit() and 1 <= int(port) <= _PORTS:
        if host != bare and _address(bare) is None:
            return None
        if host == bare and _HOSTNAME.fullmatch(host.lower()):
            return None
    return f"has {value!r}, which is not a host, or host and port, such as registry.example.org:5000"


def _proxy(value: str | None) -> str | None:
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        parts.port  # noqa: B018 - raises for what is not a port
    except ValueError as error:
        return f"is {value!r}, which is not a URL: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"is {value!r}; it must be a URL such as http://proxy.example.org:3128"
    return None


def _named(value: str) -> str | None:
    return None if value.strip() else "must not be empty"


_SETTINGS: Final[Mapping[str, Check]] = {
    "default_image": _image,
    "images": _images,
    "max_timeout_ms": _number(1000),
    "snapshot_lifetime_ms": _number(0),
    "session_history_ms": _number(0),
    "set_aside_ms": _number(0),
    "max_sandboxes": _number(1),
    "max_active_sessions": _number(1),
    "pool": _number(0, 1000),
    "pids": _number(16),
    "disk_bytes": _number(1 << 20),
    "stop_grace_ms": _number(0),
    "fold_depth": _number(2),
    "log_cap_bytes": _number(64 << 10),
    "accept": _among(OPTIONAL),
    "max_image_bytes": _number(1),
    "max_image_entries": _number(1),
    "max_images": _number(0),
    "max_images_bytes": _number(0),
    "max_source_bytes": _number(1),
    "max_pull_ms": _number(1),
    "min_free_percent": _number(0, 100),
    "insecure_registries": _each(_registry),
    "proxy": _proxy,
}
_NETWORK: Final[Mapping[str, Check]] = {
    "names": _names,
    "allowed": _each(_range),
    "host_ports": _each(_number(1, _PORTS)),
    "name_servers": _each(_name_server),
    "own_ports": _each(_number(1, _PORTS)),
    "connections": _number(1),
    "dns_rate": _number(1),
    "trusted": _each(_certificates),
    "issuer": _named,
    "ingress_address": _address,
    "ingress_port": _number(0, _PORTS),
    "ingress_domain": _domain,
}
