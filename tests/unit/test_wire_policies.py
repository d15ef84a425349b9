"""Every request form of a network policy is understood, and none of its secrets is shown again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandkeep.errors import InvalidRequest
from sandkeep.policy import (
    Forward,
    Matcher,
    NetworkPolicy,
    PairMatcher,
    RequestMatch,
    Respond,
    Rule,
    Transform,
)
from sandkeep.policy_json import authored, shown
from sandkeep.wire.base import decode, encode
from sandkeep.wire.errors import spelled
from sandkeep.wire.policies import PolicyBody

RULES = NetworkPolicy.custom(
    {
        "example.com": [],
        "api.x.com": [
            Rule(
                Transform.set_headers({"Authorization": "hunter2", "x-team": "hunter2"}),
                RequestMatch(
                    path=Matcher(starts_with="/v1/"),
                    methods=("POST",),
                    query=(PairMatcher(key=Matcher(exact="q")),),
                    headers=(PairMatcher(Matcher(exact="x-key"), Matcher(regex="hunter2")),),
                ),
            )
        ],
        "f.com": [Rule(Forward("https://p.example/x"))],
        "r.com": [
            Rule(Respond(403, (("x-a", "b"),), "no", "text/plain"), RequestMatch(path=Matcher(exact="/")))
        ],
        "*": [],
    },
    allow_subnets=["10.0.0.0/8"],
    deny_subnets=["10.1.0.0/16"],
)


def parse(body: Any) -> NetworkPolicy:
    return decode(PolicyBody, json.dumps(body).encode()).policy()


def test_the_simple_modes() -> None:
    assert parse({"mode": "allow-all"}) == NetworkPolicy.allow_all()
    assert parse({"mode": "deny-all"}) == NetworkPolicy.deny_all()


def test_lists_maps_and_subnets_alone() -> None:
    assert parse({"allow": ["a.com", "*.b.com"]}) == NetworkPolicy.custom(["a.com", "*.b.com"])
    assert parse({"allow": {"a.com": [], "*": []}}) == NetworkPolicy.custom(["a.com", "*"])
    assert parse({"subnets": {"deny": ["10.0.0.0/8"]}}) == NetworkPolicy.custom(deny_subnets=["10.0.0.0/8"])
    assert parse({"allow": {}}) == NetworkPolicy.custom()


def test_rules_as_the_python_client_writes_them() -> None:
    body = {
        "allow": {
            "example.com": [],
            "api.x.com": [
                {
                    "match": {
                        "path": {"startsWith": "/v1/"},
                        "method": ["POST"],
                        "queryString": [{"key": {"exact": "q"}}],
                        "headers": [{"key": {"exact": "x-key"}, "value": {"regex": "hunter2"}}],
                    },
                    "transform": [
                        {"headers": {"authorization": "old", "x-team": "hunter2"}},
                        {"headers": {"Authorization": "hunter2"}},
                        {},
                    ],
                }
            ],
            "f.com": [{"forwardURL": "https://p.example/x"}],
            "r.com": [
                {
                    "match": {"path": {"exact": "/"}},
                    "response": {
                        "statusCode": 403,
                        "headers": {"x-a": "b"},
                        "body": "no",
                        "contentType": "text/plain",
                    },
                }
            ],
            "*": [],
        },
        "subnets": {"allow": ["10.0.0.0/8"], "deny": ["10.1.0.0/16"]},
    }
    assert parse(body) == RULES


def test_the_older_custom_form() -> None:
    policy = parse(
        {
            "mode": "custom",
            "allowedDomains": ["a.com", "b.com"],
            "allowedCIDRs": ["10.0.0.0/8"],
            "deniedCIDRs": ["10.1.0.0/16"],
            "injectionRules": [
                {"domain": "b.com", "headers": {"k": "v"}, "match": {"method": ["GET"]}},
                {"domain": "b.com", "headers": {"k": "w"}},
            ],
        }
    )
    assert policy == NetworkPolicy.custom(
        {
            "a.com": [],
            "b.com": [
                Rule(Transform.set_headers({"k": "v"}), RequestMatch(methods=("GET",))),
                Rule(Transform.set_headers({"k": "w"})),
            ],
        },
        allow_subnets=["10.0.0.0/8"],
        deny_subnets=["10.1.0.0/16"],
    )


def test_an_injection_rule_does_not_widen_what_can_be_reached() -> None:
    rules = [{"domain": "evil.com", "headers": {}}]
    with pytest.raises(InvalidRequest, match=r"injectionRules\[0\]\.domain"):
        parse({"mode": "custom", "allowedDomains": ["a.com"], "injectionRules": rules})
    assert parse({"mode": "custom", "allowedDomains": ["*"], "injectionRules": rules}).domains[1].rules


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, ""),
        ([], ""),
        ({"mode": "open"}, "mode"),
        ({"allow": "a.com"}, "allow"),
        ({"allow": {"a.com": [{}]}}, 'allow["a.com"][0]'),
        ({"allow": {"a.com": [{"transform": [], "forwardURL": "https://x"}]}}, 'allow["a.com"][0]'),
        (
            {"allow": {"a.com": [{"match": {"path": {}}, "transform": []}]}},
            'allow["a.com"][0].match.path',
        ),
        (
            {
                "allow": {
                    "a.com": [
                        {"transform": []},
                        {"match": {"queryString": [{"key": {"regex": "x" * 2000}}]}, "transform": []},
                    ]
                }
            },
            'allow["a.com"][1].match.queryString[0].key.regex',
        ),
        (
            {"allow": {"a.com": [{"match": {"headers": [{}]}, "transform": []}]}},
            'allow["a.com"][0].match.headers[0]',
        ),
        (
            {"allow": {"a.com": [{"match": {"method": [""]}, "transform": []}]}},
            'allow["a.com"][0].match.method[0]',
        ),
        ({"allow": {"a.com": [{"forwardURL": "ftp://x"}]}}, 'allow["a.com"][0].forwardURL'),
        ({"allow": {"a.com": [{"response": {"statusCode": 99}}]}}, 'allow["a.com"][0].response.statusCode'),
        (
            {"allow": {"a.com": [{"transform": [{"headers": {"a": "\n"}}]}]}},
            'allow["a.com"][0].transform.headers["a"]',
        ),
        (
            {"allow": {"a.com": [{"transform": [{"headers": {"a": "<redacted>"}}]}]}},
            'allow["a.com"][0].transform.headers["a"]',
        ),
        ({"allow": ["http://a.com"]}, 'allow["http://a.com"]'),
        ({"subnets": {"allow": ["10.0.0.0/99"]}}, "subnets.allow[0]"),
        (
            {"mode": "custom", "injectionRules": [{"domain": "a", "headerNames": ["x"]}]},
            "injectionRules[0].headers",
        ),
    ],
)
def test_a_bad_policy_names_its_part(body: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    assert spelled(caught.value.field) == field


def test_what_is_shown_is_in_the_mode_form_with_secrets_left_out() -> None:
    text = encode(shown(RULES)).decode()
    assert "hunter2" not in text
    assert json.loads(text) == {
        "mode": "custom",
        "allowedDomains": ["example.com", "api.x.com", "f.com", "r.com", "*"],
        "allowedCIDRs": ["10.0.0.0/8"],
        "deniedCIDRs": ["10.1.0.0/16"],
        "injectionRules": [
            {
                "domain": "api.x.com",
                "headerNames": ["Authorization", "x-team"],
                "match": {
                    "path": {"startsWith": "/v1/"},
                    "method": ["POST"],
                    "queryString": [{"key": {"exact": "q"}}],
                    "headers": [{"key": {"exact": "x-key"}}],
                },
                "matchDimensions": ["path", "method", "queryString", "headers"],
            }
        ],
        "forwardRules": [{"domain": "f.com", "forwardURL": "https://p.example/x", "matchDimensions": []}],
        "responseRules": [
            {
                "domain": "r.com",
                "statusCode": 403,
                "match": {"path": {"exact": "/"}},
                "matchDimensions": ["path"],
            }
        ],
    }


def test_the_simple_modes_are_shown_without_anything_else() -> None:
    assert encode(shown(NetworkPolicy.allow_all())) == b'{"mode":"allow-all"}'
    assert encode(shown(NetworkPolicy.deny_all())) == b'{"mode":"deny-all"}'


@pytest.mark.parametrize(
    "policy", [RULES, NetworkPolicy.allow_all(), NetworkPolicy.deny_all(), NetworkPolicy.custom()]
)
def test_the_complete_form_reads_back_as_the_same_policy(policy: NetworkPolicy) -> None:
    assert decode(PolicyBody, encode(authored(policy))).policy() == policy


def test_secrets_over_http_are_asked_for_by_name_and_shown() -> None:
    entry = {"headers": {"x-key": "${secret:key}"}, "secretsOverHTTP": True}
    policy = parse({"allow": {"a.com": [{"transform": [entry]}]}})
    assert policy.domains[0].rules[0].action == Transform((("x-key", "${secret:key}"),), True)
    assert authored(policy).policy() == policy
    rules = json.loads(encode(shown(policy)))["injectionRules"]
    assert rules[0]["secretsOverHTTP"] is True and "secret:" not in str(rules)
    with pytest.raises(InvalidRequest, match=r"transform\.secretsOverHTTP: must be the same"):
        parse({"allow": {"a.com": [{"transform": [entry, {"headers": {"x-other": "1"}}]}]}})
