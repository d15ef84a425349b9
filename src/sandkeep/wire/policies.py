"""Network policies: every form a client may send, the form it is stored in, and the form it is shown in.

A policy is always *shown* in the form with a ``mode``, whatever form was sent, and never with the values it
injects. :func:`authored` is the complete form, secrets included; it is what :meth:`PolicyBody.policy` reads
back, so it serves clients as a request and the store as a record.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from msgspec import UNSET, UnsetType, field

from sandkeep.types import (
    Action,
    Forward,
    Headers,
    Matcher,
    NetworkPolicy,
    PairMatcher,
    PolicyMode,
    RequestMatch,
    Respond,
    Rule,
    Transform,
    refuse,
    within,
)
from sandkeep.wire.base import Body, Object, given

REDACTED = "<redacted>"
"""What some clients put where a shown policy has no value. Sent back, it would replace the secret."""

Dimension = Literal["path", "method", "queryString", "headers"]


class MatcherBody(Body, kw_only=True, frozen=True):
    exact: str | UnsetType = UNSET
    starts_with: str | UnsetType = UNSET
    regex: str | UnsetType = UNSET

    def matcher(self) -> Matcher:
        if sum(value is not UNSET for value in (self.exact, self.starts_with, self.regex)) != 1:
            refuse("", "needs exactly one of exact, startsWith and regex")
        return Matcher(
            exact=given(self.exact, None),
            starts_with=given(self.starts_with, None),
            regex=given(self.regex, None),
        )


class PairBody(Body, kw_only=True, frozen=True):
    key: MatcherBody | UnsetType = UNSET
    value: MatcherBody | UnsetType = UNSET

    def pair(self) -> PairMatcher:
        return PairMatcher(_matcher("key", self.key), _matcher("value", self.value))


class MatchBody(Body, kw_only=True, frozen=True):
    path: MatcherBody | UnsetType = UNSET
    method: list[str] | UnsetType = UNSET
    query_string: list[PairBody] | UnsetType = UNSET
    headers: list[PairBody] | UnsetType = UNSET

    def match(self) -> RequestMatch:
        return RequestMatch(
            path=_matcher("path", self.path),
            methods=tuple(given(self.method, [])),
            query=_pairs("queryString", self.query_string),
            headers=_pairs("headers", self.headers),
        )


class TransformBody(Body, kw_only=True, frozen=True):
    headers: dict[str, str] | UnsetType = UNSET


class ResponseBody(Body, kw_only=True, frozen=True):
    status_code: int
    headers: dict[str, str] | UnsetType = UNSET
    body: str | UnsetType = UNSET
    content_type: str | UnsetType = UNSET


class RuleBody(Body, kw_only=True, frozen=True):
    match: MatchBody | UnsetType = UNSET
    transform: list[TransformBody] | UnsetType = UNSET
    forward_url: str | UnsetType = field(default=UNSET, name="forwardURL")
    response: ResponseBody | UnsetType = UNSET

    def rule(self) -> Rule:
        if sum(value is not UNSET for value in (self.transform, self.forward_url, self.response)) != 1:
            refuse("", "needs exactly one of transform, forwardURL and response")
        match = None
        if not isinstance(self.match, UnsetType):
            with within("match"):
                match = self.match.match()
        return Rule(self._action(), match)

    def _action(self) -> Action:
        if not isinstance(self.transform, UnsetType):
            with within("transform"):
                headers = _merged(given(entry.headers, {}) for entry in self.transform)
                for name, value in headers:
                    if value == REDACTED:
                        refuse(f'headers["{name}"]', "is what a client shows in place of a secret")
                return Transform(headers)
        if not isinstance(self.forward_url, UnsetType):
            with within("forwardURL"):
                return Forward(self.forward_url)
        assert not isinstance(self.response, UnsetType)
        with within("response"):
            return Respond(
                self.response.status_code,
                headers=tuple(given(self.response.headers, {}).items()),
                body=given(self.response.body, None),
                content_type=given(self.response.content_type, None),
            )


class SubnetsBody(Body, kw_only=True, frozen=True):
    allow: list[str] | UnsetType = UNSET
    deny: list[str] | UnsetType = UNSET


class InjectionBody(Body, kw_only=True, frozen=True):
    """The older spelling of a rule that sets headers."""

    domain: str
    headers: dict[str, str]
    match: MatchBody | UnsetType = UNSET


class PolicyBody(Body, kw_only=True, frozen=True):
    """Any request form: a mode, lists or a map of domains with subnets, or the older custom mode."""

    mode: PolicyMode | UnsetType = UNSET
    allow: list[str] | dict[str, list[RuleBody]] | UnsetType = UNSET
    subnets: SubnetsBody | UnsetType = UNSET
    allowed_domains: list[str] | UnsetType = UNSET
    allowed_cidrs: list[str] | UnsetType = field(default=UNSET, name="allowedCIDRs")
    denied_cidrs: list[str] | UnsetType = field(default=UNSET, name="deniedCIDRs")
    injection_rules: list[InjectionBody] | UnsetType = UNSET

    def policy(self) -> NetworkPolicy:
        """The policy meant.

        Raises:
            InvalidRequest: naming the part, as in ``allow["api.x.com"][0].match.path.regex``.
        """
        if self.mode is PolicyMode.ALLOW_ALL:
            return NetworkPolicy.allow_all()
        if self.mode is PolicyMode.DENY_ALL:
            return NetworkPolicy.deny_all()
        if self.mode is UNSET and self.allow is UNSET and self.subnets is UNSET:
            refuse("", "a network policy needs a mode, allow or subnets")
        if isinstance(self.subnets, UnsetType):
            allow, deny = given(self.allowed_cidrs, []), given(self.denied_cidrs, [])
        else:
            allow, deny = given(self.subnets.allow, []), given(self.subnets.deny, [])
        return NetworkPolicy.custom(self._domains(), allow_subnets=allow, deny_subnets=deny)

    def _domains(self) -> dict[str, list[Rule]]:
        if isinstance(self.allow, UnsetType):
            return self._legacy_domains()
        if isinstance(self.allow, list):
            return {name: [] for name in self.allow}
        domains: dict[str, list[Rule]] = {}
        for name, bodies in self.allow.items():
            domains[name] = []
            for index, body in enumerate(bodies):
                with within(f'allow["{name}"][{index}]'):
                    domains[name].append(body.rule())
        return domains

    def _legacy_domains(self) -> dict[str, list[Rule]]:
        domains: dict[str, list[Rule]] = {name: [] for name in given(self.allowed_domains, [])}
        everything = "*" in domains
        for index, body in enumerate(given(self.injection_rules, [])):
            with within(f"injectionRules[{index}]"):
                # Injecting headers must not widen what can be reached.
                if body.domain not in domains and not everything:
                    refuse("domain", "is not one of allowedDomains")
                rule = RuleBody(match=body.match, transform=[TransformBody(headers=body.headers)])
                domains.setdefault(body.domain, []).append(rule.rule())
        return domains


class InjectionRuleObject(Object, kw_only=True, frozen=True):
    domain: str
    header_names: list[str]
    match: MatchBody | UnsetType = UNSET
    match_dimensions: list[Dimension]


class ForwardRuleObject(Object, kw_only=True, frozen=True):
    domain: str
    forward_url: str = field(name="forwardURL")
    match: MatchBody | UnsetType = UNSET
    match_dimensions: list[Dimension]


class ResponseRuleObject(Object, kw_only=True, frozen=True):
    domain: str
    status_code: int
    match: MatchBody | UnsetType = UNSET
    match_dimensions: list[Dimension]


class PolicyObject(Object, kw_only=True, frozen=True):
    """A policy as responses show it."""

    mode: PolicyMode
    allowed_domains: list[str] | UnsetType = UNSET
    allowed_cidrs: list[str] | UnsetType = field(default=UNSET, name="allowedCIDRs")
    denied_cidrs: list[str] | UnsetType = field(default=UNSET, name="deniedCIDRs")
    injection_rules: list[InjectionRuleObject] | UnsetType = UNSET
    forward_rules: list[ForwardRuleObject] | UnsetType = UNSET
    response_rules: list[ResponseRuleObject] | UnsetType = UNSET


def shown(policy: NetworkPolicy) -> PolicyObject:
    """A policy without anything it keeps secret."""
    if policy.mode is not PolicyMode.CUSTOM:
        return PolicyObject(mode=policy.mode)
    injections: list[InjectionRuleObject] = []
    forwards: list[ForwardRuleObject] = []
    answers: list[ResponseRuleObject] = []
    for domain in policy.domains:
        for rule in domain.rules:
            common: dict[str, Any] = {
                "domain": domain.pattern,
                "match": _shown_match(rule.match),
                "match_dimensions": _dimensions(rule.match),
            }
            match rule.action:
                case Transform(headers=headers):
                    names = [name for name, _ in headers]
                    injections.append(InjectionRuleObject(header_names=names, **common))
                case Forward(url=url):
                    forwards.append(ForwardRuleObject(forward_url=url, **common))
                case Respond(status_code=status_code):
                    answers.append(ResponseRuleObject(status_code=status_code, **common))
    return PolicyObject(
        mode=policy.mode,
        allowed_domains=[domain.pattern for domain in policy.domains],
        allowed_cidrs=list(policy.allow_subnets),
        denied_cidrs=list(policy.deny_subnets),
        injection_rules=injections or UNSET,
        forward_rules=forwards or UNSET,
        response_rules=answers or UNSET,
    )


def authored(policy: NetworkPolicy) -> PolicyBody:
    """The complete form of a policy, with its secrets."""
    if policy.mode is not PolicyMode.CUSTOM:
        return PolicyBody(mode=policy.mode)
    return PolicyBody(
        allow={domain.pattern: [_authored_rule(rule) for rule in domain.rules] for domain in policy.domains},
        subnets=SubnetsBody(allow=list(policy.allow_subnets), deny=list(policy.deny_subnets)),
    )


def _authored_rule(rule: Rule) -> RuleBody:
    match = UNSET if rule.match is None else _match_body(rule.match)
    action = rule.action
    if isinstance(action, Transform):
        return RuleBody(match=match, transform=[TransformBody(headers=dict(action.headers))])
    if isinstance(action, Forward):
        return RuleBody(match=match, forward_url=action.url)
    response = ResponseBody(
        status_code=action.status_code,
        headers=dict(action.headers) or UNSET,
        body=UNSET if action.body is None else action.body,
        content_type=UNSET if action.content_type is None else action.content_type,
    )
    return RuleBody(match=match, response=response)


def _matcher(name: str, body: MatcherBody | UnsetType) -> Matcher | None:
    if isinstance(body, UnsetType):
        return None
    with within(name):
        return body.matcher()


def _pairs(name: str, bodies: list[PairBody] | UnsetType) -> tuple[PairMatcher, ...]:
    pairs = []
    for index, body in enumerate(given(bodies, [])):
        with within(f"{name}[{index}]"):
            pairs.append(body.pair())
    return tuple(pairs)


def _merged(entries: Iterable[dict[str, str]]) -> Headers:
    """Several header maps as one; a later one wins, whatever the case of its names."""
    merged: dict[str, tuple[str, str]] = {}
    for headers in entries:
        for name, value in headers.items():
            merged[name.lower()] = (name, value)
    return tuple(merged.values())


def _matcher_body(matcher: Matcher | None) -> MatcherBody | UnsetType:
    return UNSET if matcher is None else MatcherBody(**{matcher.kind: matcher.value})


def _pair_body(pair: PairMatcher) -> PairBody:
    return PairBody(key=_matcher_body(pair.key), value=_matcher_body(pair.value))


def _match_body(match: RequestMatch) -> MatchBody:
    return MatchBody(
        path=_matcher_body(match.path),
        method=list(match.methods) or UNSET,
        query_string=[_pair_body(pair) for pair in match.query] or UNSET,
        headers=[_pair_body(pair) for pair in match.headers] or UNSET,
    )


def _shown_match(match: RequestMatch | None) -> MatchBody | UnsetType:
    if match is None:
        return UNSET
    # What a header must equal can be a credential too, so only its name is shown.
    headers = tuple(PairMatcher(key=pair.key) for pair in match.headers if pair.key is not None)
    return _match_body(RequestMatch(match.path, match.methods, match.query, headers))


def _dimensions(match: RequestMatch | None) -> list[Dimension]:
    if match is None:
        return []
    present: list[tuple[Dimension, object]] = [
        ("path", match.path),
        ("method", match.methods),
        ("queryString", match.query),
        ("headers", match.headers),
    ]
    return [name for name, value in present if value]
