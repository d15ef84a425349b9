"""Secrets over the API: names and times go out, values never do; and what is published without a token."""

from __future__ import annotations

import httpx
import pytest

from tests.server.conftest import Box, create, scoped
from tests.server.harness import PROJECT, ServerProcess
from tests.server.test_sandboxes import refused

pytest.importorskip("cryptography", reason="secrets need sandkeep[net]")
VALUE = "hunter2-and-more"


def test_a_secret_is_set_listed_and_deleted_and_its_value_is_never_shown(
    server: ServerProcess, api: httpx.Client
) -> None:
    first = api.put("/v1/secrets/github", params=scoped(), json={"value": VALUE})
    assert first.status_code == 200, first.text
    again = api.put("/v1/secrets/github", params=scoped(), json={"value": VALUE + "2"})
    made, changed = first.json()["secret"], again.json()["secret"]
    assert changed["createdAt"] == made["createdAt"] <= changed["updatedAt"]
    listed = api.get("/v1/secrets", params=scoped())
    assert listed.json() == {"secrets": [changed]}
    assert set(changed) == {"name", "createdAt", "updatedAt"}
    assert api.delete("/v1/secrets/github", params=scoped()).json() == {}
    assert refused(api.delete("/v1/secrets/github", params=scoped())) == (404, "not_found")
    assert api.get("/v1/secrets", params=scoped()).json() == {"secrets": []}
    assert VALUE not in first.text + again.text + listed.text + server.log()
    for part in server.data.glob("store.db*"):
        assert VALUE.encode() not in part.read_bytes()


def test_secrets_of_another_project_are_absent(server: ServerProcess, api: httpx.Client) -> None:
    api.put("/v1/secrets/ours", params=scoped(), json={"value": VALUE})
    with server.client(server.make_token(team="other", project="other")) as other:
        assert other.get("/v1/secrets").json() == {"secrets": []}
        assert refused(other.delete("/v1/secrets/ours")) == (404, "not_found")
        assert refused(other.get("/v1/secrets", params=scoped())) == (403, "forbidden")
    assert api.delete("/v1/secrets/ours", params=scoped()).status_code == 200


def test_what_no_header_can_carry_is_refused_without_being_repeated(api: httpx.Client) -> None:
    for name, value in (("a b", VALUE), ("multi", f"{VALUE}\nx"), ("wide", f"{VALUE}→"), ("none", "")):
        answer = api.put(f"/v1/secrets/{name}", params=scoped(), json={"value": value})
        assert refused(answer) == (400, "bad_request"), name
        assert VALUE not in answer.text


def test_a_policy_can_name_a_secret_that_is_there(api: httpx.Client) -> None:
    rule = {"transform": [{"headers": {"authorization": "Bearer ${secret:deploy}"}}]}
    policy = {"mode": "custom", "allow": {"example.test": [rule]}}
    answer = api.post("/v3/sandboxes", params=scoped(), json={"projectId": PROJECT, "networkPolicy": policy})
    assert refused(answer) == (400, "bad_request") and "deploy" in answer.text
    api.put("/v1/secrets/deploy", params=scoped(), json={"value": VALUE})
    box: Box = create(api, networkPolicy=policy)
    shown = api.get(f"/v2/sandboxes/{box.name}", params=scoped()).text
    api.delete(f"/v2/sandboxes/{box.name}", params=scoped(deleteOrphanSnapshots="true"))
    api.delete("/v1/secrets/deploy", params=scoped())
    assert VALUE not in shown


def test_the_key_set_is_public_and_has_no_private_part(server: ServerProcess) -> None:
    with server.client(token="") as anybody:
        (key,) = anybody.get("/.well-known/jwks").json()["keys"]
        assert refused(anybody.get("/v1/secrets")) == (401, "unauthorized")
    assert key["kty"] == "RSA" and key["alg"] == "RS256" and "d" not in key
