"""Network policies: which hosts a session may reach, and what happens to its requests.

Policies are frozen values that check themselves once, when they are built. Nothing here knows how JSON
spells them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from sandkeep.checks import _NAME_CHARACTERS, check_text, check_url, expect, refuse, within
from sandkeep.dataclass import dataclass
from sandkeep.states import PolicyMode

MAX_REGEX = 1024
_TOKEN_CHARACTERS = _NAME_CHARACTERS | frozenset("!#$%&'*+.^`|~")
_PROXY_MANAGED = frozenset({"connection", "content-length", "transfer-encoding"})
_BODILESS = frozenset({204, 205, 304})


@dataclass(frozen=True, slots=True, init=False)
class Matcher:
    """Compare one text in one way."""

    kind: str
    """``exact``, ``starts_with`` or ``regex``."""
    value: str

    def __init__(
        self, *, exact: str | None = None, starts_with: str | None = None, regex: str | None = None
    ) -> None:
        given = {"exact": exact, "starts_with": starts_with, "regex": regex}
        chosen = [(kind, value) for kind, value in given.items() if value is not None]
        if len(chosen) != 1:
            refuse("", "needs exactly one of exact, starts_with and regex")
        kind, value = chosen[0]
        if kind == "regex" and len(value) > MAX_REGEX:
            refuse("regex", f"must have at most {MAX_REGEX} characters")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "value", value)


@dataclass(frozen=True, slots=True)
class PairMatcher:
    """Compare a header or query parameter by name, by value, or both."""

    key: Matcher | None = None
    value: Matcher | None = None

    def __post_init__(self) -> None:
        if self.key is None and self.value is None:
            refuse("", "needs a key or a value")


@dataclass(frozen=True, slots=True)
class RequestMatch:
    """Which requests a rule is for: every dimension given must match."""

    path: Matcher | None = None
    methods: tuple[str, ...] = ()
    """Any of them."""
    query: tuple[PairMatcher, ...] = ()
    """All of them."""
    headers: tuple[PairMatcher, ...] = ()
    """All of them; names without regard to case."""

    def __post_init__(self) -> None:
        for index, method in enumerate(self.methods):
            if not method or not _TOKEN_CHARACTERS.issuperset(method):
                refuse(f"methods[{index}]", "is not an HTTP method")


Headers = tuple[tuple[str, str], ...]


def _check_headers(headers: Headers) -> None:
    if isinstance(headers, Mapping):
        refuse("headers", "must be pairs of name and value, not a mapping; pass tuple(mapping.items())")
    expect("headers", headers, (tuple, list), "pairs of name and value")
    seen: set[str] = set()
    for index, pair in enumerate(headers):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(x, str) for x in pair)):
            refuse(f"headers[{index}]", "must be a pair of name and value, both text")
        name, value = pair
        path = f'headers["{name}"]'
        if not name or not _TOKEN_CHARACTERS.issuperset(name):
            refuse(path, "is not a valid header name")
        if name.lower() in seen:
            refuse(path, "is listed twice")
        # A value is sent as it is, so a line break in it would start another header.
        if any(character in value for character in "\r\n\0") or not _is_latin1(value):
            refuse(path, "is not a valid header value")
        seen.add(name.lower())


def _is_latin1(text: str) -> bool:
    return all(ord(character) < 256 for character in text)


@dataclass(frozen=True, slots=True)
class Transform:
    """Set headers on the request before it leaves."""

    headers: Headers = field(repr=False)
    secrets_over_http: bool = False
    """Allow values of secrets in requests without TLS, which anyone on the path can read; otherwise such a
    request is refused."""

    def __post_init__(self) -> None:
        _check_headers(self.headers)

    @classmethod
    def set_headers(cls, headers: Mapping[str, str], *, secrets_over_http: bool = False) -> Transform:
        """Set these headers, replacing those of the same name in the request."""
        expect("headers", headers, Mapping, "a mapping of names to values")
        return cls(tuple(headers.items()), secrets_over_http)


@dataclass(frozen=True, slots=True)
class Forward:
    """Send the request to another URL, with the original one described in its headers."""

    url: str

    def __post_init__(self) -> None:
        check_url("url", self.url, ("http", "https"), bare=True)


@dataclass(frozen=True, slots=True)
class Respond:
    """Answer the request without contacting the destination."""

    status_code: int
    headers: Headers = field(default=(), repr=False)
    body: str | None = None
    content_type: str | None = None

    def __post_init__(self) -> None:
        expect("status_code", self.status_code, int, "a whole number")
        if self.body is not None:
            expect("body", self.body, str, "text")
        if not 200 <= self.status_code <= 599:
            refuse("status_code", "must be between 200 and 599")
        if self.body is not None and self.status_code in _BODILESS:
            refuse("body", f"is not allowed with status {self.status_code}")
        if self.body is not None and self.content_type is None:
            refuse("content_type", "is required with a body")
        if self.content_type is not None:
            check_text("content_type", self.content_type, limit=256)
        _check_headers(self.headers)
        for name, _ in self.headers:
            if name.lower() in _PROXY_MANAGED:
                refuse(f'headers["{name}"]', "is set by the proxy itself")


Action = Transform | Forward | Respond


@dataclass(frozen=True, slots=True)
class Rule:
    """What to do with the requests that match; without a match, with every request."""

    action: Action
    match: RequestMatch | None = None


@dataclass(frozen=True, slots=True)
class Domain:
    """A name that may be reached, and the rules for requests to it, first match first.

    ``*`` alone is every name, a leading ``*.`` stands for one or more labels, ``*`` elsewhere for one.
    """

    pattern: str
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        problem = _domain_problem(self.pattern)
        if problem:
            refuse("", problem)


def _domain_problem(pattern: str) -> str | None:
    if pattern == "*":
        return None
    if not pattern or len(pattern) > 253:
        return "is not a domain name"
    if not pattern.isascii():
        return "must be in its ASCII (punycode) form"
    from ipaddress import ip_address

    try:
        ip_address(pattern.strip("[]"))
    except ValueError:
        pass
    else:
        return "is an address; list it under subnets"
    for label in pattern.removesuffix(".").split("."):
        if label == "*":
            continue
        if not 1 <= len(label) <= 63 or not _NAME_CHARACTERS.issuperset(label):
            return "is not a domain name ('*' may only stand for whole labels)"
    return None


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """What a session may reach. Build one with :meth:`allow_all`, :meth:`deny_all` or :meth:`custom`."""

    mode: PolicyMode
    domains: tuple[Domain, ...] = ()
    allow_subnets: tuple[str, ...] = ()
    deny_subnets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode is not PolicyMode.CUSTOM and (self.domains or self.allow_subnets or self.deny_subnets):
            refuse("mode", f"{self.mode.value} cannot have domains or subnets")
        seen: set[str] = set()
        for domain in self.domains:
            normal = domain.pattern.lower().removesuffix(".")
            if normal in seen:
                refuse(f'domains["{domain.pattern}"]', "is listed twice")
            seen.add(normal)
        if not (self.allow_subnets or self.deny_subnets):
            return
        from ipaddress import ip_network

        for name, subnets in (("allow_subnets", self.allow_subnets), ("deny_subnets", self.deny_subnets)):
            for index, subnet in enumerate(subnets):
                try:
                    ip_network(subnet, strict=False)
                except ValueError:
                    refuse(f"{name}[{index}]", f"{subnet!r} is not an address range")

    @classmethod
    def allow_all(cls) -> NetworkPolicy:
        """Allow everything public."""
        return cls(PolicyMode.ALLOW_ALL)

    @classmethod
    def deny_all(cls) -> NetworkPolicy:
        """Allow nothing."""
        return cls(PolicyMode.DENY_ALL)

    @classmethod
    def custom(
        cls,
        domains: Mapping[str, Sequence[Rule]] | Iterable[str] = (),
        *,
        allow_subnets: Iterable[str] = (),
        deny_subnets: Iterable[str] = (),
    ) -> NetworkPolicy:
        """Allow only what is listed: names (with rules for their requests) and address ranges.

        Denied ranges override everything else; allowed ranges need no name.
        """
        named = domains if isinstance(domains, Mapping) else dict.fromkeys(domains, ())
        built = []
        for pattern, rules in named.items():
            with within(f'domains["{pattern}"]'):
                built.append(Domain(pattern, tuple(rules)))
        return cls(PolicyMode.CUSTOM, tuple(built), tuple(allow_subnets), tuple(deny_subnets))
