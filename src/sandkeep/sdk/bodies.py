"""Request bodies, made from the arguments that callers pass.

Arguments are checked here, before anything is sent: the error names the argument.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Protocol

from sandkeep.checks import byte_length, check_metadata, duration, expect, milliseconds, refuse
from sandkeep.errors import InvalidRequest
from sandkeep.policy import NetworkPolicy
from sandkeep.policy_json import authored
from sandkeep.sdk.sandboxes import ConfigurationChanges
from sandkeep.sdk.sandboxes import Duration as Duration
from sandkeep.spec import (
    MAX_BATCH,
    OPTIONS,
    GitSource,
    HostPort,
    Mount,
    Resources,
    SandboxSpec,
    SnapshotRetention,
    SnapshotSource,
    Source,
    TarballSource,
    check_env,
    check_secrets,
    check_together,
)
from sandkeep.wire.base import encode

_STDOUT = -2
"""The constant of ``subprocess``, copied because importing that module is slow."""


class Texts(Protocol):
    """A sequence of texts that is not itself one text, which would be a sequence of characters.

    Type checkers accept lists, tuples and every other ``Sequence[str]`` but ``str``, whose ``in`` takes texts
    only.
    """

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def __reversed__(self) -> Iterator[str]: ...
    def __contains__(self, value: object, /) -> bool: ...
    def __getitem__(self, index: int, /) -> str: ...


def _resources(value: Resources) -> dict[str, Any]:
    return {**{_camel(name): asked for name, asked in value.asked.items()}, "exact": value.exact}


def _retention(value: SnapshotRetention) -> dict[str, Any]:
    body: dict[str, Any] = {"count": value.count, "deleteEvicted": value.delete_evicted}
    if value.expiration is not None:
        body["expiration"] = milliseconds(value.expiration)
    return body


def _source(value: Source) -> dict[str, Any]:
    if isinstance(value, GitSource):
        optional = {
            "depth": value.depth,
            "revision": value.revision,
            "username": value.username,
            "password": value.password,
        }
        known = {name: given for name, given in optional.items() if given is not None}
        return {"type": "git", "url": value.url, **known}
    if isinstance(value, TarballSource):
        return {"type": "tarball", "url": value.url}
    return {"type": "snapshot", "snapshotId": value.snapshot_id}


def _spelled(value: Any) -> Any:
    """Return a field of a `SandboxSpec` as bodies have it."""
    match value:
        case timedelta():
            return milliseconds(value)
        case Resources():
            return _resources(value)
        case SnapshotRetention():
            return _retention(value)
        case NetworkPolicy():
            return authored(value)
        case HostPort():
            return {"port": value.port, "name": value.name}
        case Mount():
            return {"drive": value.drive, "mode": value.mode.value}
        case tuple():
            return [_spelled(item) for item in value]
        case Mapping():
            return {key: _spelled(item) for key, item in value.items()}
        case GitSource() | TarballSource() | SnapshotSource():
            return _source(value)
    return value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


_KEYWORDS = {option.keyword: name for name, option in OPTIONS.items() if option.keyword is not None}


def configuration(**given: Any) -> dict[str, Any]:
    """Return the body for the keywords that were given.

    ``None`` is left out, except for ``snapshot_retention``, where it means that no rule applies.

    Raises:
        InvalidRequest: an option is invalid; ``field`` names it.
    """
    unknown = given.keys() - _KEYWORDS.keys()
    if unknown:
        raise TypeError(f"a sandbox has no configuration {', '.join(sorted(unknown))}")
    fields: dict[str, Any] = {}
    for keyword, value in given.items():
        if value is None:
            continue
        name = _KEYWORDS[keyword]
        if OPTIONS[name].milliseconds:
            value = duration(value, keyword)
        elif name == "ports":
            expect("ports", value, Iterable, "a sequence of numbers")
            value = tuple(value)
        elif name == "host_ports":
            expect("host_ports", value, Iterable, "a sequence of HostPort")
            value = tuple(value)
        fields[name] = value
    with _as_given():
        SandboxSpec(**fields)
        check_together(fields)
    body = {_camel(OPTIONS[name].body or name): _spelled(value) for name, value in fields.items()}
    if given.get("snapshot_retention", body) is None:
        body["keepLastSnapshots"] = None
    return body


def changes(**given: Any) -> dict[str, Any]:
    """Return the body that changes these options, where ``None`` can mean something."""
    unknown = given.keys() - ConfigurationChanges.__optional_keys__
    if unknown:
        raise TypeError(f"cannot be changed of a sandbox: {', '.join(sorted(unknown))}")
    return configuration(**given)


@contextmanager
def _as_given() -> Iterator[None]:
    """Make errors name the argument as the caller spells it."""
    try:
        yield
    except InvalidRequest as error:
        name, dot, rest = str(error.details.get("field", "")).partition(".")
        keyword = OPTIONS[name].keyword if name in OPTIONS else None
        if keyword in (None, name):
            raise
        refuse(f"{keyword}{dot}{rest}", error.details.get("problem", error.message))


def check_count(count: int) -> None:
    """Check how many sandboxes a request is to make."""
    expect("count", count, int, "a number")
    if not 1 <= count <= MAX_BATCH:
        refuse("count", f"must be between 1 and {MAX_BATCH}, not {count}")


def policy(value: NetworkPolicy) -> bytes:
    """Return the body of a network policy, with the values it injects."""
    expect("policy", value, NetworkPolicy, "a NetworkPolicy")
    return encode(authored(value))


def process(
    command: str,
    args: Texts,
    *,
    cwd: str | None,
    env: Mapping[str, str | None] | None,
    sudo: bool,
    user: str | None,
    kill_after: Duration | None,
    stdin: bool,
    stderr: Literal["stdout"] | int | None = None,
    grace: Duration | None = None,
    metadata: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the body that starts a process."""
    _check_args(args)
    body: dict[str, Any] = {"command": command, "args": list(args), "sudo": sudo}
    if cwd is not None:
        body["cwd"] = cwd
    if env:
        check_env(env, removal=True)
        body["env"] = dict(env)
    if secrets:
        check_secrets(secrets, env or {})
        body["secrets"] = dict(secrets)
    if user is not None:
        body["user"] = user
    if kill_after is not None:
        body["timeout"] = _kill_after(kill_after)
    if grace is not None:
        body["grace"] = grace_period(grace)
    if stdin:
        body["attachStdin"] = True
    if stderr is not None:
        if stderr not in ("stdout", _STDOUT):
            refuse("stderr", 'must be "stdout" or subprocess.STDOUT')
        body["stderr"] = "stdout"
    if metadata:
        check_metadata(metadata)
        body["metadata"] = dict(metadata)
    return body


def terminal(
    command: str,
    args: Texts,
    *,
    cwd: str | None,
    env: Mapping[str, str | None] | None,
    columns: int,
    rows: int,
    kill_after: Duration | None,
    detachable: bool = False,
    metadata: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the message that starts a program on a terminal; mistakes are found here, before it is sent."""
    _check_args(args)
    words = {"command": command, **{f"args[{index}]": word for index, word in enumerate(args)}}
    if cwd is not None:
        words["cwd"] = cwd
    for name, word in words.items():
        expect(name, word, str, "text")
        if "\0" in word:
            refuse(name, "must not contain a NUL character")
        byte_length(name, word)
    if not command:
        refuse("command", "must not be empty")
    variables = {"TERM": "xterm-256color", **(env or {})}
    check_env(variables, removal=True)
    check_secrets(secrets or {}, variables)
    unset = [name for name, value in variables.items() if value is None]
    check_size(columns, rows)
    expect("detachable", detachable, bool, "True or False")
    if metadata:
        check_metadata(metadata)
    return {
        "type": "start",
        "readsErrors": True,
        "readsAttached": True,
        "command": command,
        "args": list(args),
        "env": [f"{name}={value}" for name, value in variables.items() if value is not None],
        **({"unset": unset} if unset else {}),
        **({"secrets": dict(secrets)} if secrets else {}),
        "cwd": cwd,
        "cols": columns,
        "rows": rows,
        "timeout": _kill_after(kill_after),
        **({"detachable": True} if detachable else {}),
        **({"metadata": dict(metadata)} if metadata else {}),
    }


def attachment(
    process: str, *, columns: int | None, rows: int | None, scrollback: int | None
) -> dict[str, Any]:
    """Return the message that attaches to a terminal."""
    body: dict[str, Any] = {"type": "attach", "process": process}
    if columns is not None or rows is not None:
        for name, edge in (("columns", columns), ("rows", rows)):
            expect(name, edge, int, "a number, as the other one is given")
        assert columns is not None and rows is not None
        check_size(columns, rows)
        body |= {"cols": columns, "rows": rows}
    if scrollback is not None:
        expect("scrollback", scrollback, int, "a number of bytes")
        if scrollback < 0:
            refuse("scrollback", "must not be negative")
        body["scrollback"] = scrollback
    return body


def _kill_after(limit: Duration | None) -> int | None:
    """Return a process's time limit in milliseconds."""
    if limit is None:
        return None
    found = milliseconds(duration(limit, "kill_after"))
    if found < 1:
        refuse("kill_after", "must be at least 1 ms")
    return found


def grace_period(grace: Duration) -> int:
    """Return the time between SIGTERM and SIGKILL in milliseconds."""
    found = duration(grace, "grace")
    if found <= timedelta(0):
        refuse("grace", "must be longer than 0; without it SIGKILL is sent at once")
    return max(milliseconds(found), 1)


def time_limit(timeout: Duration) -> float:
    """Return a time limit of a call in seconds."""
    found = duration(timeout, "timeout").total_seconds()
    if found <= 0:
        refuse("timeout", f"must be longer than 0, not {found:g} seconds; pass None to wait without a limit")
    return found


def check_size(columns: int, rows: int) -> None:
    """Check the size of a terminal."""
    for name, value in (("columns", columns), ("rows", rows)):
        expect(name, value, int, "a number")
        if not 1 <= value <= 65_535:
            refuse(name, f"must be between 1 and 65535, not {value}")


def _check_args(args: Texts) -> None:
    if isinstance(args, str):
        refuse("args", "must be a sequence of strings, not one string")
    expect("args", args, Iterable, "a sequence of strings")


_NAMES = (
    *("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE"),
    *("ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ"),
    *("VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS"),
)
_SIGNALS = {name: number for number, name in enumerate(_NAMES, start=1)}
_SIGNALS |= {"IOT": 6, "CLD": 17, "POLL": 29, "RTMIN": 34, "RTMAX": 64}
SIGKILL = _SIGNALS["KILL"]
SIGTERM = _SIGNALS["TERM"]


def signal_number(signal: int | str) -> int:
    """Return a signal's Linux number, given by number or name with or without ``SIG``.

    Clients on other systems number some signals differently, so the host's own numbers are not used.
    """
    if isinstance(signal, signals.Signals):
        signal = signal.name
    if isinstance(signal, str):
        name = signal.upper() if signal.upper().startswith("SIG") else f"SIG{signal.upper()}"
        try:
            return _SIGNALS[name.removeprefix("SIG")]
        except KeyError:
            refuse("signal", f"{signal!r} is not the name of a signal")
    expect("signal", signal, int, "a number or a name")
    if not 1 <= signal <= 64:
        refuse("signal", f"must be between 1 and 64, not {signal}")
    return int(signal)
