"""Verdicts of a network policy: may this connection be made, and what happens to this request.

Nothing here opens a socket or reads a clock; the caller brings the name, the resolved address and the
request, and acts on the answer.

A connection is judged in this order, and the first line that applies decides:

1. an address in a denied range of the policy: denied;
2. an address no tenant may reach (loopback, link-local and metadata services, private and reserved ranges):
   denied, unless the operator listed it;
3. the modes allow-all and deny-all;
4. a name matched by a domain with rules: inspected, because skipping rules would skip what they restrict;
5. an address in an allowed range: allowed;
6. a name matched by a domain: allowed;
7. everything else: denied. A literal address has no name, so only ranges can allow it.

When several domains match, the most specific one speaks: an exact name, then the pattern with most labels.

Regular expressions have RE2's syntax and must run in linear time, since those who write the policy and those
who send the requests may both be hostile. The standard library's ``re`` cannot promise that, so without the
``re2`` module (``google-re2``, an optional dependency) a policy with one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from importlib import import_module
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from sandkeep.addresses import Address as Address
from sandkeep.addresses import AddressRange, special_kind, unmapped
from sandkeep.checks import refuse, within
from sandkeep.errors import HostCannot, InvalidRequest
from sandkeep.policy import (
    Domain,
    Forward,
    Matcher,
    NetworkPolicy,
    PairMatcher,
    RequestMatch,
    Rule,
    Transform,
)
from sandkeep.states import PolicyMode

Pairs = Sequence[tuple[str, str]]
_Rank = tuple[int, int, int]

_REGEX_MEMORY = 1 << 20
"""Bytes RE2 may use for one compiled pattern; a larger one is refused when it is compiled."""

_REGEX_WORK = 1 << 18
"""Steps of a compiled pattern times characters: the most one comparison may take, some milliseconds."""
_REGEX_STEPS = 4096
"""Of a pattern: a larger one could not be given enough text to be of use."""

_MAPPED = IPv6Network("::ffff:0:0/96")
"""IPv4 addresses in an IPv6 spelling."""


_FRAMING = frozenset({"connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer"})
"""Headers that are about one connection, or say where a message ends: wrong ones split a request in two."""


class TooMuchText(Exception):
    """A text is too long to be matched in time with a regular expression of this size."""


class Decision(StrEnum):
    ALLOW = "allow"
    DENY = "deny"
    INSPECT = "inspect"
    """Terminate TLS, then ask :func:`match_rule` about every request."""


class Judgement(NamedTuple):
    decision: Decision
    reason: str
    rule: str | None = None
    """The line of the policy that decided: a range or a domain pattern."""
    domain: Domain | None = None
    """Whose rules apply, when the connection is to be inspected."""
    of_host: bool = False
    """Whether it leads to a port of this machine that the sandbox was given."""


class Judge:
    """One policy, prepared to judge many connections."""

    def __init__(self, policy: NetworkPolicy, *, operator_allowed: Iterable[str] = ()) -> None:
        self._mode = policy.mode
        self._denied = _networks(policy.deny_subnets)
        self._allowed = _networks(policy.allow_subnets)
        self._operator = _networks(operator_allowed)
        self._exact: dict[str, Domain] = {}
        self._suffixes: dict[str, tuple[_Rank, Domain]] = {}
        self._patterns: list[tuple[_Rank, list[str], Domain]] = []
        for index, domain in enumerate(policy.domains):
            normal = _normal_name(domain.pattern)
            labels = normal.split(".")
            # Smaller is more specific; equally specific patterns keep the order they were written in.
            rank = (-sum(label != "*" for label in labels), -len(labels), index)
            if "*" not in normal:
                self._exact[normal] = domain
            elif labels[0] == "*" and "*" not in labels[1:]:
                self._suffixes[normal[2:]] = (rank, domain)
            else:
                self._patterns.append((rank, labels, domain))
        self._patterns.sort(key=lambda pattern: pattern[0])

    def decide(self, *, name: str | None, address: Address | None, port: int) -> Judgement:
        """Judge a connection to ``port`` of ``name`` at ``address``, either of which may not be known yet.

        A verdict without an address only says that the name does not stand in the way: ask again with the
        address that was resolved.
        """
        if name is not None:
            literal = literal_address(name)
            if literal is not None:
                name, address = None, literal
        if name is None and address is None:
            return Judgement(Decision.DENY, "neither a name nor an address is known")
        if address is not None:
            address = unmapped(address)
            refused = self._refused(address)
            if refused is not None:
                return refused
        if self._mode is PolicyMode.ALLOW_ALL:
            return Judgement(Decision.ALLOW, "the policy allows everything")
        if self._mode is PolicyMode.DENY_ALL:
            return Judgement(Decision.DENY, "the policy denies everything")
        domain = self.domain(name) if name is not None else None
        if domain is not None and domain.rules:
            return Judgement(Decision.INSPECT, "the domain has rules", domain.pattern, domain)
        if address is not None:
            text = _containing(address, self._allowed)
            if text is not None:
                return Judgement(Decision.ALLOW, "the address is in an allowed range", text)
        if domain is not None:
            return Judgement(Decision.ALLOW, "the domain is allowed", domain.pattern)
        if name is None:
            return Judgement(Decision.DENY, f"{address} port {port} has no name and is in no allowed range")
        return Judgement(Decision.DENY, f"{name} port {port} is not an allowed domain")

    def domain(self, name: str) -> Domain | None:
        """Return the most specific domain of the policy that matches a name."""
        normal = _normal_name(name)
        exact = self._exact.get(normal)
        if exact is not None:
            return exact
        found = self._suffix_domain(normal)
        labels = normal.split(".")
        for rank, pattern, domain in self._patterns:
            if found is not None and rank > found[0]:
                break
            if _labels_match(pattern, labels):
                return domain
        return None if found is None else found[1]

    def _suffix_domain(self, name: str) -> tuple[_Rank, Domain] | None:
        """The longest ``*.suffix`` that matches; ``*`` alone is the empty one."""
        while name:
            _, _, name = name.partition(".")
            found = self._suffixes.get(name)
            if found is not None:
                return found
        return self._suffixes.get("")

    def _refused(self, address: Address) -> Judgement | None:
        text = _containing(address, self._denied)
        if text is not None:
            return Judgement(Decision.DENY, "the address is in a denied range", text)
        kind = special_kind(address)
        if kind is None or _containing(address, self._operator) is not None:
            return None
        return Judgement(Decision.DENY, f"{address} is {kind} and not listed by the operator")


def is_within(address: Address, ranges: Iterable[str]) -> bool:
    """Whether an address, in either spelling, is in one of these ranges."""
    return _containing(unmapped(address), _networks(ranges)) is not None


def decide(
    policy: NetworkPolicy,
    *,
    name: str | None,
    address: Address | None,
    port: int,
    operator_allowed: Iterable[str] = (),
) -> Judgement:
    """Judge one connection; keep a :class:`Judge` for more."""
    return Judge(policy, operator_allowed=operator_allowed).decide(name=name, address=address, port=port)


def match_rule(rules: Iterable[Rule], *, method: str, path: str, query: Pairs, headers: Pairs) -> Rule | None:
    """Return the first rule for a request, without yielding: see :func:`matching`."""
    steps = matching(rules, method=method, path=path, query=query, headers=headers)
    while True:
        try:
            next(steps)
        except StopIteration as found:
            rule: Rule | None = found.value
            return rule


def matching(
    rules: Iterable[Rule], *, method: str, path: str, query: Pairs, headers: Pairs
) -> Generator[None, None, Rule | None]:
    """Return the first rule for a request. ``path`` must have gone through :func:`canonical_path`.

    Yields after each comparison: each takes little time, but their number is not limited.

    Raises:
        HostCannot: a rule needs a regular expression and there is no engine for it. The caller must refuse
            the request.
        TooMuchText: as above, because matching would take too long.
    """
    for rule in rules:
        match = rule.match
        if match is None:
            return rule
        if (yield from _request_matches(match, method=method, path=path, query=query, headers=headers)):
            return rule
    return None


def canonical_path(path: str) -> str:
    """Return the path both to judge and to send, so that the two cannot mean different things.

    Unreserved characters are unescaped and dot segments resolved.

    Raises:
        InvalidRequest: servers disagree about where the path leads.
    """
    if not path.startswith("/"):
        return path or "/"
    if _BROKEN_ESCAPE.search(path):
        # Unescaping what follows could complete it, and servers disagree about its meaning before that.
        refuse("path", "has a '%' that is not an escape")
    segments: list[str] = []
    parts = _unescape_unreserved(path).split("/")[1:]
    for part in parts:
        pieces = _SEPARATORS.split(_OVERLONG_DOT.sub(".", part))
        if part not in (".", "..") and any(_PARAMETERS.split(piece)[0] in (".", "..") for piece in pieces):
            refuse("path", "hides a dot segment")
        if part == "..":
            del segments[-1:]
        elif part != ".":
            segments.append(part)
    if parts[-1] in (".", ".."):
        segments.append("")
    return "/" + "/".join(segments)


def refuse_ambiguous(rules: Iterable[Rule], *, method: str, path: str, headers: Pairs) -> None:
    """Refuse a request that servers are known to read as another method or path than the rules do.

    Only where a rule looks at methods, or at paths. ``path`` must have gone through :func:`canonical_path`.

    Raises:
        InvalidRequest: names the part.
    """
    matches = [rule.match for rule in rules if rule.match is not None]
    names = {name.lower().replace("_", "-") for name, _ in headers}
    if any(match.methods for match in matches):
        if method != method.upper():
            refuse("method", "is not in upper case, which some servers do not tell apart, and rules do")
        for name in sorted(names & _OTHER_METHOD):
            refuse(name, "names another method, and a rule looks at methods")
    if any(match.path is not None for match in matches):
        for pattern, problem in _AMBIGUOUS:
            if pattern.search(path):
                refuse(
                    "path", f"{problem}, which some servers read as another path, and a rule looks at paths"
                )
        for name in sorted(names & _OTHER_PATH):
            refuse(name, "names another path, and a rule looks at paths")


def validate(policy: NetworkPolicy, *, operator_allowed: Iterable[str] = ()) -> None:
    """Refuse a policy that this server cannot enforce: its patterns must compile, netd must not need the
    headers it sets, and tenants must be allowed to reach the addresses it forwards to.

    Raises:
        InvalidRequest: names the pattern, as in ``domains["api.x.com"][0].match.path.regex``.
    """
    for domain in policy.domains:
        for index, rule in enumerate(domain.rules):
            with within(f'domains["{domain.pattern}"][{index}]'):
                if rule.match is not None:
                    with within("match"):
                        _validate_match(rule.match)
                if isinstance(rule.action, Transform):
                    _validate_headers(rule.action)
                if isinstance(rule.action, Forward):
                    _validate_target(rule.action, operator_allowed)


def regex_available() -> bool:
    """Whether policies with regular expressions can be accepted on this machine.

    Loads the engine, so a process that is about to lose its files asks this first.
    """
    return _re2() is not None


def _validate_target(forward: Forward, operator_allowed: Iterable[str]) -> None:
    """A name is judged when it is looked up; an address can be judged now."""
    address = literal_address(urlsplit(forward.url).hostname or "")
    kind = special_kind(address) if address is not None else None
    if address is not None and kind is not None and not is_within(address, operator_allowed):
        refuse("forwardURL", f"{address} is {kind} and not listed by the operator")


def _validate_headers(transform: Transform) -> None:
    for name, _ in transform.headers:
        if name.lower() == "host":
            refuse(f'transform.headers["{name}"]', "cannot be replaced: it says whom the request is for")
        if name.lower() in _FRAMING:
            refuse(f'transform.headers["{name}"]', "is set by the proxy itself")


def _validate_match(match: RequestMatch) -> None:
    if match.path is not None:
        _validate_matcher("path", match.path)
    for name, pairs in (("query", match.query), ("headers", match.headers)):
        for index, pair in enumerate(pairs):
            if pair.key is not None:
                _validate_matcher(f"{name}[{index}].key", pair.key)
            if pair.value is not None:
                _validate_matcher(f"{name}[{index}].value", pair.value)


def _validate_matcher(field_path: str, matcher: Matcher) -> None:
    if matcher.kind != "regex":
        return
    try:
        steps = _compiled(matcher.value, True).programsize
        if steps > _REGEX_STEPS:
            refuse(f"{field_path}.regex", f"is too large: {steps} steps, and {_REGEX_STEPS} are allowed")
    except HostCannot as error:
        problem = "regular expressions are not available on this server"
        raise InvalidRequest(
            f"{field_path}.regex: {problem}", hint=error.hint, field=f"{field_path}.regex", problem=problem
        ) from None
    except ValueError as error:
        refuse(f"{field_path}.regex", f"is not an RE2 pattern: {error}")


@lru_cache(maxsize=1)
def _re2() -> Any:
    try:
        return import_module("re2")
    except ImportError:
        return None


@lru_cache(maxsize=4096)
def _compiled(pattern: str, case_sensitive: bool) -> Any:
    engine = _re2()
    if engine is None:
        raise HostCannot(
            "no linear-time regular expression engine is installed",
            hint="install the google-re2 package next to sandkeep, or match with exact or startsWith",
            part="regular expressions",
            why="the re2 module cannot be imported",
        )
    options = engine.Options()
    options.max_mem = _REGEX_MEMORY
    options.log_errors = False
    options.case_sensitive = case_sensitive
    try:
        return engine.compile(pattern, options=options)
    except engine.error as error:
        cause = error.args[0] if error.args else "cannot be compiled"
        raise ValueError(cause.decode() if isinstance(cause, bytes) else str(cause)) from None


def _text_matches(matcher: Matcher | None, text: str, *, case_sensitive: bool = True) -> bool:
    if matcher is None:
        return True
    if matcher.kind == "regex":
        pattern = _compiled(matcher.value, case_sensitive)
        if pattern.programsize * len(text) > _REGEX_WORK:
            most = _REGEX_WORK // pattern.programsize
            raise TooMuchText(
                f"a regular expression of a rule can be given {most} characters, not {len(text)}"
            )
        return pattern.search(text) is not None
    wanted = matcher.value
    if not case_sensitive:
        wanted, text = wanted.lower(), text.lower()
    return text == wanted if matcher.kind == "exact" else text.startswith(wanted)


def _pair_present(matcher: PairMatcher, pairs: Pairs, *, case_sensitive: bool) -> Generator[None, None, bool]:
    for key, value in pairs:
        yield
        if _text_matches(matcher.key, key, case_sensitive=case_sensitive):
            yield
            if _text_matches(matcher.value, value):
                return True
    return False


def _request_matches(
    match: RequestMatch, *, method: str, path: str, query: Pairs, headers: Pairs
) -> Generator[None, None, bool]:
    yield
    if (match.methods and method not in match.methods) or not _text_matches(match.path, path):
        return False
    for wanted, pairs, case_sensitive in (
        *((wanted, query, True) for wanted in match.query),
        *((wanted, headers, False) for wanted in match.headers),
    ):
        if not (yield from _pair_present(wanted, pairs, case_sensitive=case_sensitive)):
            return False
    return True


def _networks(texts: Iterable[str]) -> list[tuple[str, AddressRange]]:
    found: list[tuple[str, AddressRange]] = []
    for text in texts:
        network = ip_network(text, strict=False)
        if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
            # Addresses in this spelling are judged as the IPv4 addresses they are; so is the range.
            length = network.prefixlen - _MAPPED.prefixlen
            network = IPv4Network((int(network.network_address) & 0xFFFFFFFF, length))
        found.append((text, network))
    return found


def _containing(address: Address, networks: list[tuple[str, AddressRange]]) -> str | None:
    for text, network in networks:
        if address.version == network.version and address in network:
            return text
    return None


def literal_address(name: str) -> Address | None:
    """Return the address that a text is, with or without brackets; ``None`` for a name."""
    try:
        return ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _normal_name(name: str) -> str:
    return name.lower().removesuffix(".")


def _labels_match(pattern: list[str], labels: list[str]) -> bool:
    if pattern[0] == "*":
        rest = pattern[1:]
        if len(labels) <= len(rest):
            return False
        pattern, labels = rest, labels[len(labels) - len(rest) :]
    if len(pattern) != len(labels):
        return False
    return all(wanted in ("*", label) for wanted, label in zip(pattern, labels, strict=True))


_BROKEN_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")
_SEPARATORS = re.compile(r"\\|%5c|%2f|%c0%af", re.IGNORECASE)
"""What is a slash to some servers; the last is one in a longer form than UTF-8 permits."""
_OVERLONG_DOT = re.compile("%c0%ae", re.IGNORECASE)
_PARAMETERS = re.compile(";|%3b", re.IGNORECASE)
"""Begins parameters of a segment, which some servers take off before they resolve dots."""

_AMBIGUOUS = (
    (re.compile("//"), "has an empty segment"),
    (re.compile(r"\\|%5c", re.IGNORECASE), "has a backslash"),
    (re.compile("%2f", re.IGNORECASE), "has an escaped slash"),
    (re.compile("%[01][0-9a-f]|%7f|[\\x00-\\x1f\\x7f]", re.IGNORECASE), "has a control character"),
    (re.compile("/(;|%3b)", re.IGNORECASE), "has a segment of parameters only"),
    (re.compile("%25[0-9a-f]{2}", re.IGNORECASE), "is escaped twice"),
    (re.compile("%c[01]", re.IGNORECASE), "has a character in a longer form than UTF-8 permits"),
)
_OTHER_METHOD = frozenset({"x-http-method-override", "x-http-method", "x-method-override"})
_OTHER_PATH = frozenset({"x-original-url", "x-rewrite-url"})
"""Headers some servers believe instead of the request line."""

_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def _unescape_unreserved(path: str) -> str:
    if "%" not in path:
        return path
    head, *escapes = path.split("%")
    out = [head]
    for escape in escapes:
        character = chr(int(escape[:2], 16))
        out.append(character + escape[2:] if character in _UNRESERVED else f"%{escape}")
    return "".join(out)
