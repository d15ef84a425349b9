"""A network policy's verdicts, asked as a table: who may be reached, and which rule a request meets."""

from __future__ import annotations

import time
from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkeep.errors import HostCannot, InvalidRequest
from sandkeep.net import policy as policy_module
from sandkeep.net.policy import (
    Decision,
    Judge,
    TooMuchText,
    canonical_path,
    decide,
    match_rule,
    regex_available,
    validate,
)
from sandkeep.policy import Matcher, NetworkPolicy, PairMatcher, RequestMatch, Respond, Rule, Transform

INJECT = Rule(Transform.set_headers({"authorization": "secret"}))
PUBLIC = "93.184.216.34"

needs_re2 = pytest.mark.skipif(not regex_available(), reason="google-re2 is not installed")


def verdict(
    policy: NetworkPolicy, target: str, *, at: str | None = None, operator: tuple[str, ...] = ()
) -> str:
    address = None if at is None else ip_address(at)
    return decide(policy, name=target, address=address, port=443, operator_allowed=operator).decision.value


@pytest.mark.parametrize(
    ("pattern", "name", "allowed"),
    [
        ("example.com", "example.com", True),
        ("example.com", "EXAMPLE.com.", True),
        ("Example.COM", "example.com", True),
        ("example.com", "www.example.com", False),
        ("example.com", "example.com.evil.net", False),
        ("example.com", "notexample.com", False),
        ("*.example.com", "www.example.com", True),
        ("*.example.com", "a.b.c.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com", "evilexample.com", False),
        ("api.*.example.com", "api.eu.example.com", True),
        ("api.*.example.com", "api.a.b.example.com", False),
        ("*.api.*.com", "x.y.api.z.com", True),
        ("*", "anything.at.all", True),
    ],
)
def test_domain_patterns(pattern: str, name: str, allowed: bool) -> None:
    policy = NetworkPolicy.custom([pattern])
    assert verdict(policy, name, at=PUBLIC) == ("allow" if allowed else "deny")


def test_the_most_specific_domain_speaks_whatever_the_order() -> None:
    for names in (["*", "*.x.com", "api.x.com"], ["api.x.com", "*.x.com", "*"]):
        judge = Judge(NetworkPolicy.custom({name: [INJECT] for name in names}))
        found = [judge.domain(name) for name in ("api.x.com", "www.x.com", "y.com")]
        assert [domain and domain.pattern for domain in found] == ["api.x.com", "*.x.com", "*"]


def test_a_pattern_with_more_labels_beats_a_shorter_suffix() -> None:
    patterns = ["*.com", "api.*.com", "*.x.com", "www.*.x.com"]
    for names in (patterns, patterns[::-1]):
        judge = Judge(NetworkPolicy.custom(names))
        found = [judge.domain(name) for name in ("www.a.x.com", "b.x.com", "api.y.com", "y.com", "x.org")]
        assert [domain and domain.pattern for domain in found] == [
            "www.*.x.com",
            "*.x.com",
            "api.*.com",
            "*.com",
            None,
        ]


def test_a_domain_with_rules_is_inspected_and_names_its_rules() -> None:
    policy = NetworkPolicy.custom({"api.x.com": [INJECT], "*": []}, allow_subnets=["0.0.0.0/0"])
    answer = decide(policy, name="api.x.com", address=ip_address(PUBLIC), port=443)
    assert answer.decision is Decision.INSPECT
    assert answer.domain is not None
    assert answer.domain.rules == (INJECT,)
    assert verdict(policy, "other.com", at=PUBLIC) == "allow"


def test_a_denied_range_beats_an_allowed_range_and_an_allowed_domain() -> None:
    policy = NetworkPolicy.custom(["x.com"], allow_subnets=["93.0.0.0/8"], deny_subnets=["93.184.0.0/16"])
    assert verdict(policy, "x.com", at=PUBLIC) == "deny"
    assert verdict(policy, PUBLIC) == "deny"
    assert verdict(policy, "93.1.1.1") == "allow"


def test_ranges_of_mapped_addresses_are_ranges_of_the_addresses() -> None:
    mapped = "::ffff:93.184.0.0/112"
    assert verdict(NetworkPolicy.custom(["x.com"], deny_subnets=[mapped]), "x.com", at=PUBLIC) == "deny"
    allowing = NetworkPolicy.custom([], allow_subnets=[mapped])
    assert verdict(allowing, PUBLIC) == verdict(allowing, f"::ffff:{PUBLIC}") == "allow"
    assert verdict(allowing, "93.185.0.1") == "deny"
    assert verdict(NetworkPolicy.custom([], allow_subnets=["::/0"]), PUBLIC) == "deny"


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding", "connection", "upgrade"])
def test_headers_that_are_not_the_policys_to_set_are_refused(name: str) -> None:
    policy = NetworkPolicy.custom({"x.com": [Rule(Transform.set_headers({name: "1"}))]})
    with pytest.raises(InvalidRequest) as caught:
        validate(policy)
    assert caught.value.details["field"] == f'domains["x.com"][0].transform.headers["{name}"]'


def test_an_allowed_range_needs_no_name_and_bypasses_the_domain_list() -> None:
    policy = NetworkPolicy.custom(["x.com"], allow_subnets=["93.184.216.34"])
    assert verdict(policy, "unlisted.net", at=PUBLIC) == "allow"
    assert verdict(policy, PUBLIC) == "allow"


def test_a_literal_address_is_never_matched_by_a_domain() -> None:
    policy = NetworkPolicy.custom(["*"])
    assert verdict(policy, "anything.org", at=PUBLIC) == "allow"
    assert verdict(policy, PUBLIC) == "deny"
    assert verdict(policy, "[2606:2800:220:1::1]") == "deny"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.255.0.9",
        "::1",
        "169.254.169.254",
        "169.254.1.1",
        "168.63.129.16",
        "10.1.2.3",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "fe80::1",
        "fd00::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "::",
    ],
)
def test_built_in_refusals_hold_in_every_mode_until_the_operator_lists_the_range(address: str) -> None:
    allowing = [
        NetworkPolicy.allow_all(),
        NetworkPolicy.custom(["*"], allow_subnets=["0.0.0.0/0", "::/0"]),
    ]
    for policy in allowing:
        assert verdict(policy, "innocent.com", at=address) == "deny"
        assert verdict(policy, address) == "deny"
        assert verdict(policy, "innocent.com", at=address, operator=("0.0.0.0/0", "::/0")) == "allow"
    assert verdict(NetworkPolicy.deny_all(), address, operator=("0.0.0.0/0", "::/0")) == "deny"


def test_the_operator_lifts_a_refusal_but_does_not_grant_access() -> None:
    policy = NetworkPolicy.custom(["x.com"])
    assert verdict(policy, "10.0.0.5", operator=("10.0.0.0/8",)) == "deny"
    assert verdict(policy, "x.com", at="10.0.0.5", operator=("10.0.0.0/8",)) == "allow"


def test_a_name_alone_is_judged_before_it_is_resolved() -> None:
    policy = NetworkPolicy.custom(["x.com"])
    assert verdict(policy, "x.com") == "allow"
    assert verdict(policy, "y.com") == "deny"
    assert decide(policy, name=None, address=None, port=1).decision is Decision.DENY


def test_every_verdict_says_why() -> None:
    policy = NetworkPolicy.custom(["x.com"], deny_subnets=["8.8.0.0/16"])
    denied = decide(policy, name="x.com", address=ip_address("8.8.8.8"), port=53)
    assert (denied.reason, denied.rule) == ("the address is in a denied range", "8.8.0.0/16")
    assert "y.com port 22" in decide(policy, name="y.com", address=None, port=22).reason


def request(rules: list[Rule], path: str = "/", **given: object) -> int | None:
    arguments: dict[str, object] = {"method": "GET", "query": [], "headers": [], **given}
    found = match_rule(rules, path=path, **arguments)  # type: ignore[arg-type]
    return None if found is None else rules.index(found)


def test_the_first_matching_rule_wins_and_a_rule_without_match_is_for_all() -> None:
    rules = [
        Rule(Respond(201), RequestMatch(path=Matcher(exact="/a"))),
        Rule(Respond(202), RequestMatch(path=Matcher(starts_with="/a"))),
        Rule(Respond(403)),
    ]
    assert [request(rules, path) for path in ("/a", "/ab", "/A")] == [0, 1, 2]
    assert request(rules[:2], "/other") is None


def test_dimensions_are_anded_methods_ored_and_pairs_anded() -> None:
    match = RequestMatch(
        path=Matcher(starts_with="/v1/"),
        methods=("POST", "PUT"),
        query=(PairMatcher(key=Matcher(exact="q")), PairMatcher(value=Matcher(exact="2"))),
        headers=(PairMatcher(key=Matcher(exact="X-Key"), value=Matcher(exact="V")),),
    )
    rules = [Rule(Respond(200), match)]
    good: dict[str, object] = {
        "method": "PUT",
        "query": [("q", "1"), ("r", "2")],
        "headers": [("x-KEY", "V")],
    }
    assert request(rules, "/v1/x", **good) == 0
    assert request(rules, "/v2/x", **good) is None
    assert request(rules, "/v1/x", **{**good, "method": "put"}) is None
    assert request(rules, "/v1/x", **{**good, "query": [("q", "1")]}) is None
    assert request(rules, "/v1/x", **{**good, "query": [("Q", "2")]}) is None
    assert request(rules, "/v1/x", **{**good, "headers": [("x-key", "v")]}) is None


@needs_re2
def test_regular_expressions_search_and_stay_linear() -> None:
    rules = [Rule(Respond(200), RequestMatch(path=Matcher(regex=r"^/(a+a+)+$")))]
    assert request(rules, "/aaaa") == 0
    started = time.perf_counter()
    assert request(rules, "/" + "a" * 20_000 + "!") is None
    assert time.perf_counter() - started < 60
    header = [Rule(Respond(200), RequestMatch(headers=(PairMatcher(key=Matcher(regex="^X-[a-z]+$")),)))]
    assert request(header, headers=[("x-ABC", "1")]) == 0


@needs_re2
@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"(a)\1", "(a{1000}){1000}", "((a|b)?){900}c$"])
def test_a_pattern_re2_cannot_take_is_refused_by_the_name_of_its_field(pattern: str) -> None:
    match = RequestMatch(query=(PairMatcher(value=Matcher(regex=pattern)),))
    with pytest.raises(InvalidRequest) as caught:
        validate(NetworkPolicy.custom({"api.x.com": [INJECT, Rule(Respond(200), match)]}))
    assert caught.value.field == 'domains["api.x.com"][1].match.query[0].value.regex'


@needs_re2
def test_a_text_too_long_to_be_compared_in_time_is_not_compared() -> None:
    rules = [Rule(Respond(200), RequestMatch(path=Matcher(regex="((a|b)?){500}c$")))]
    assert request(rules, "/ab") is None
    with pytest.raises(TooMuchText, match=r"can be given \d+ characters, not 30001"):
        request(rules, "/" + "ab" * 15_000)
    usual = [Rule(Respond(200), RequestMatch(path=Matcher(regex="^/v[0-9]+/(repos|orgs)/[^/]+/issues")))]
    assert request(usual, "/v3/repos/x/issues/" + "y" * 7000) == 0


def test_without_a_linear_engine_regular_expressions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for an install without the optional package: the import finds nothing."""
    monkeypatch.setattr(policy_module, "_re2", lambda: None)
    policy_module._compiled.cache_clear()
    rule = Rule(Respond(200), RequestMatch(path=Matcher(regex="a")))
    assert not regex_available()
    with pytest.raises(InvalidRequest, match=r"path\.regex: regular expressions are not available"):
        validate(NetworkPolicy.custom({"x.com": [rule]}))
    with pytest.raises(HostCannot):
        request([rule], "/a")
    validate(NetworkPolicy.custom({"x.com": [INJECT]}))


@pytest.mark.parametrize(
    ("given_path", "meant"),
    [
        ("", "/"),
        ("/", "/"),
        ("*", "*"),
        ("/a/./b", "/a/b"),
        ("/v1/../admin", "/admin"),
        ("/v1/%2e%2E/admin", "/admin"),
        ("/../../x", "/x"),
        ("/a/..", "/"),
        ("/a/b/.", "/a/b/"),
        ("/%61dmin", "/admin"),
        ("/a%2Fb", "/a%2Fb"),
        ("/a;b=1/c..;d", "/a;b=1/c..;d"),
        ("//a", "//a"),
    ],
)
def test_a_path_has_one_meaning(given_path: str, meant: str) -> None:
    assert canonical_path(given_path) == meant


@pytest.mark.parametrize(
    "path",
    [
        "/v1/..%2fadmin",
        "/v1/x%2f..%2fy",
        "/v1/..\\admin",
        "/a/%2e%2e%5cb",
        "/a%zz%",
        "/v1/%2%65%2%65/admin",
        "/v1/%%32e%%32e/admin",
        "/v1/..;/admin",
        "/v1/%2e.%3Bx=1/admin",
        "/v1/x%2f..;%2fy",
        "/v1/%c0%ae%C0%AE/admin",
        "/v1/x%c0%af..%c0%afy",
    ],
)
def test_a_path_servers_would_read_differently_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest):
        canonical_path(path)


@settings(deadline=None)
@given(st.text(alphabet="ab./%2eE\\5c;36", max_size=30))
def test_canonical_paths_are_stable_and_hold_no_dot_segments(text: str) -> None:
    try:
        once = canonical_path("/" + text)
    except InvalidRequest:
        return
    assert not {".", ".."} & set(once.split("/"))
    assert canonical_path(once) == once
