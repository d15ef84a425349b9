"""The JSON forms of a network policy that more than one package reads or writes.

The *complete* form has everything, values of headers included: clients send it, the store keeps it with those
values sealed, and the server gives it to netd. The *shown* form has a ``mode`` and no value that a rule
injects. The other forms in which a client may send a policy are in ``wire.policies``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType, field

from sandkeep.checks import refuse, within
from sandkeep.policy import (
    Action,
    Forward,
    Headers,
    Matcher,
    NetworkPolicy,
    PairMatcher,
    RequestMatch,
    Respond,
    Rule,
    Transform,
)
from sandkeep.states import PolicyMode

T = TypeVar("T")


class Form(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """A part of a policy in JSON. An absent field is ``UNSET`` and is left out when written."""


def given(value: T | UnsetType, default: T) -> T:
    """Return a field's value, or ``default`` if the field is absent."""
    return default if isinstance(value, UnsetType) else value


REDACTED = "<redacted>"
"""Some clients put this where a shown policy has no value. Sent back, it would replace the secret."""

Dimension = Literal["path", "method", "queryString", "headers"]


class MatcherBody(Form, kw_only=True, frozen=True):
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


class PairBody(Form, kw_only=True, frozen=True):
    key: MatcherBody | UnsetType = UNSET
    value: MatcherBody | UnsetType = UNSET

    def pair(self) -> PairMatcher:
        return PairMatcher(_matcher("key", self.key), _matcher("value", self.value))


class MatchBody(Form, kw_only=True, frozen=True):
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


class TransformBody(Form, kw_only=True, frozen=True):
    headers: dict[str, str] | UnsetType = UNSET
    secrets_over_http: bool | UnsetType = field(default=UNSET, name="secretsOverHTTP")


class ResponseBody(Form, kw_only=True, frozen=True):
    status_code: int
    headers: dict[str, str] | UnsetType = UNSET
    body: str | UnsetType = UNSET
    content_type: str | UnsetType = UNSET


class RuleBody(Form, kw_only=True, frozen=True):
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
                        refuse(f'headers["{name}"]', "is the placeholder for a secret; send the value")
                over_http = {given(entry.secrets_over_http, False) for entry in self.transform}
                if len(over_http) > 1:
                    refuse("secretsOverHTTP", "must be the same in every entry of a rule")
                return Transform(headers, True in over_http)
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


class SubnetsBody(Form, kw_only=True, frozen=True):
    allow: list[str] | UnsetType = UNSET
    deny: list[str] | UnsetType = UNSET


class CompletePolicy(Form, kw_only=True, frozen=True):
    """The complete form: a mode alone, or domains with their rules and address ranges."""

    mode: PolicyMode | UnsetType = UNSET
    allow: dict[str, list[RuleBody]] | UnsetType = UNSET
    subnets: SubnetsBody | UnsetType = UNSET

    def policy(self) -> NetworkPolicy:
        """Return the policy.

        Raises:
            InvalidRequest: naming the part, as in ``allow["api.x.com"][0].match.path.regex``.
        """
        if isinstance(self.mode, PolicyMode) and self.mode is not PolicyMode.CUSTOM:
            return NetworkPolicy(self.mode)
        subnets = given(self.subnets, SubnetsBody())
        return NetworkPolicy.custom(
            rules_of(given(self.allow, {})),
            allow_subnets=given(subnets.allow, []),
            deny_subnets=given(subnets.deny, []),
        )


def rules_of(domains: Mapping[str, list[RuleBody]]) -> dict[str, list[Rule]]:
    """Return the rules of each domain of ``allow``."""
    found: dict[str, list[Rule]] = {}
    for name, bodies in domains.items():
        found[name] = []
        for index, body in enumerate(bodies):
            with within(f'allow["{name}"][{index}]'):
                found[name].append(body.rule())
    return found


def read(stored: Mapping[str, Any] | None) -> NetworkPolicy:
    """Return the policy of a complete form; without one, everything is allowed."""
    return NetworkPolicy.allow_all() if stored is None else msgspec.convert(stored, CompletePolicy).policy()


class InjectionRuleObject(Form, kw_only=True, frozen=True):
    domain: str
    header_names: list[str]
    secrets_over_http: bool | UnsetType = field(default=UNSET, name="secretsOverHTTP")
    match: MatchBody | UnsetType = UNSET
    match_dimensions: list[Dimension]


class ForwardRuleObject(Form, kw_only=True, frozen=True):
    domain: str
    forward_url: str = field(name="forwardURL")
    match: MatchBody | UnsetType = UNSET
    match_dimensions: list[Dimension]


class ResponseRuleObject(Form, kw_only=True, frozen=True):
    domain: str
    status_code: int
    match: MatchBody | UnsetType = UNSET
    match_dimensions: list[Dimension]


class PolicyObject(Form, kw_only=True, frozen=True):
    """A policy as responses show it."""

    mode: PolicyMode
    allowed_domains: list[str] | UnsetType = UNSET
    allowed_cidrs: list[str] | UnsetType = field(default=UNSET, name="allowedCIDRs")
    denied_cidrs: list[str] | UnsetType = field(default=UNSET, name="deniedCIDRs")
    injection_rules: list[InjectionRuleObject] | UnsetType = UNSET
    forward_rules: list[ForwardRuleObject] | UnsetType = UNSET
    response_rules: list[ResponseRuleObject] | UnsetType = UNSET


def shown(policy: NetworkPolicy) -> PolicyObject:
    """Return the shown form of a policy."""
    if policy.mode is not PolicyMode.CUSTOM:
        return PolicyObject(mode=policy.mode)
    injections: list[InjectionRuleObject] = []
    forwards: list[ForwardRuleObject] = []
    response_rules: list[ResponseRuleObject] = []
    for domain in policy.domains:
        for rule in domain.rules:
            common: dict[str, Any] = {
                "domain": domain.pattern,
                "match": _shown_match(rule.match),
                "match_dimensions": _dimensions(rule.match),
            }
            match rule.action:
                case Transform(headers=headers, secrets_over_http=over_http):
                    names = [name for name, _ in headers]
                    injections.append(
                        InjectionRuleObject(
                            header_names=names, secrets_over_http=over_http or UNSET, **common
                        )
                    )
                case Forward(url=url):
                    forwards.append(ForwardRuleObject(forward_url=url, **common))
                case Respond(status_code=status_code):
                    response_rules.append(ResponseRuleObject(status_code=status_code, **common))
    return PolicyObject(
        mode=policy.mode,
        allowed_domains=[domain.pattern for domain in policy.domains],
        allowed_cidrs=list(policy.allow_subnets),
        denied_cidrs=list(policy.deny_subnets),
        injection_rules=injections or UNSET,
        forward_rules=forwards or UNSET,
        response_rules=response_rules or UNSET,
    )


def authored(policy: NetworkPolicy) -> CompletePolicy:
    """Return the complete form of a policy, with its secrets."""
    if policy.mode is not PolicyMode.CUSTOM:
        return CompletePolicy(mode=policy.mode)
    return CompletePolicy(
        allow={domain.pattern: [_authored_rule(rule) for rule in domain.rules] for domain in policy.domains},
        subnets=SubnetsBody(allow=list(policy.allow_subnets), deny=list(policy.deny_subnets)),
    )


def _authored_rule(rule: Rule) -> RuleBody:
    match = UNSET if rule.match is None else _match_body(rule.match)
    action = rule.action
    if isinstance(action, Transform):
        over_http = action.secrets_over_http or UNSET
        transform = TransformBody(headers=dict(action.headers), secrets_over_http=over_http)
        return RuleBody(match=match, transform=[transform])
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
    """Merge header maps; a later one wins, and names are compared without regard to case."""
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
