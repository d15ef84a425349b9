"""Network policies as clients may send them: the complete form, a list of domains, or the older custom mode.

The complete form and the form that responses show are in ``sandkeep.policy_json``.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType, field

from sandkeep.checks import refuse, within
from sandkeep.policy import NetworkPolicy, Rule
from sandkeep.policy_json import MatchBody, RuleBody, SubnetsBody, TransformBody, rules_of
from sandkeep.states import PolicyMode
from sandkeep.wire.base import Body, given


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
        """Return the policy that this form describes.

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
        return rules_of(self.allow)

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
