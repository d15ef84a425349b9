"""Secrets over the API: names and times go out, values never do; and what is published without a token."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandkeep.store.migrations import STEPS, sealed_policies
from tests.polling import ENOUGH
from tests.server.conftest import Box, create, scoped
from tests.server.server_process import PROJECT, ServerProcess, running_server
from tests.server.test_sandboxes import refused
from tests.unit.store_rows import drop_columns_since_sealed_policies

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


def test_what_cannot_be_kept_or_sent_is_refused_without_being_repeated(api: httpx.Client) -> None:
    for name, value in (("a b", VALUE), ("nul", f"{VALUE}\0x"), ("long", VALUE * 8192), ("none", "")):
        answer = api.put(f"/v1/secrets/{name}", params=scoped(), json={"value": value})
        assert refused(answer) == (400, "bad_request"), name
        assert VALUE not in answer.text
    for value in (f"{VALUE}\nx", f"{VALUE}→"):
        api.put("/v1/secrets/wide", params=scoped(), json={"value": value})
        rule = {"transform": [{"headers": {"authorization": "Bearer ${secret:wide}"}}]}
        body = {"projectId": PROJECT, "networkPolicy": {"mode": "custom", "allow": {"x.example": [rule]}}}
        answer = api.post("/v3/sandboxes", params=scoped(), json=body)
        assert refused(answer) == (400, "bad_request")
        assert "does not fit into an HTTP header" in answer.text and VALUE not in answer.text
    api.delete("/v1/secrets/wide", params=scoped())


def test_a_secret_is_a_variable_of_one_process_and_written_nowhere(able: None) -> None:
    value = "line-one-7cd1\nline-two-é-99af"
    parts = [part.encode() for part in value.split("\n")]
    look = (
        "tr '\\0' '\\n' < /proc/$1/environ | grep -c line-one; "
        "grep -l 'line-[o]ne' /proc/[0-9]*/environ 2>/dev/null | wc -l"
    )
    with running_server() as server, server.client() as api:
        api.put("/v1/secrets/openai", params=scoped(), json={"value": value})
        box = create(api)
        waiting = box.start(
            "sh", "-c", 'echo $$; printf %s "$KEY" | sha256sum; exec sleep 1000', secrets={"KEY": "openai"}
        )
        log = f"{box.path}/cmd/{waiting['id']}/logs"
        with api.stream("GET", log, params=scoped()) as lines:
            said = ""
            for line in lines.iter_lines():
                said += json.loads(line)["data"] if line else ""
                if said.count("\n") == 2:
                    break
        pid, digest = said.split()[:2]
        assert digest == hashlib.sha256(value.encode()).hexdigest()
        found = everything_in(server.data)
        assert not [path for path, data in found.items() if any(part in data for part in parts)]
        # A process without it does not have it. The same user can read it, another one cannot.
        assert outcome(box.run("sh", "-c", "echo ${KEY-none}")) == "none\n"
        assert outcome(box.run("sh", "-c", look, "look", pid)).split() == ["1", "1"]
        if os.geteuid() == 0:
            box.run("useradd", "other", sudo=True)
            denied = outcome(box.run("sh", "-c", f"cat /proc/{pid}/environ", user="other"))
            assert "denied" in denied and "line-one" not in denied
        for wrong, status in (({"KEY": "absent"}, 404), ({"A=B": "openai"}, 400), ({"X": "openai"}, 400)):
            answer = box.run("true", secrets=wrong, env={"X": "y"})
            assert answer.status_code == status and "secrets[" in answer.text, answer.text
            assert parts[0].decode() not in answer.text
        shown = api.get("/v1/events", params=scoped(limit="100")).text
        assert "process.started" in shown and parts[0].decode() not in shown
        assert parts[0].decode() not in api.get(f"{box.path}/cmd", params=scoped()).text
        api.post(f"{box.path}/stop", params=scoped(), json={})
        server.stop()
        found = everything_in(server.data)
        assert not [path for path, data in found.items() if any(part in data for part in parts)]
        server.start()


def outcome(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    records = [json.loads(line) for line in answer.text.splitlines() if line]
    return "".join(record["data"] for record in records if "stream" in record)


def everything_in(directory: Path) -> dict[str, bytes]:
    """The content of every file below a directory: store, logs, records, states, layers."""
    found: dict[str, bytes] = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(parent, name)
            if os.path.isfile(path) and not os.path.islink(path):
                try:
                    with open(path, "rb") as handle:
                        found[path] = handle.read()
                except (FileNotFoundError, PermissionError):
                    continue
    assert any(path.endswith("store.db") for path in found)
    return found


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


def stored_bytes(data: Path) -> bytes:
    return b"".join(part.read_bytes() for part in data.glob("store.db*"))


def policy_with_values(*values: str) -> dict[str, Any]:
    """One that sets a header, one that answers with a header, and one that looks for a header."""
    sets, answers, looks = values
    return {
        "allow": {
            "set.test": [{"transform": [{"headers": {"authorization": f"Bearer {sets}"}}]}],
            "answer.test": [{"response": {"statusCode": 200, "headers": {"x-key": answers}}}],
            "look.test": [
                {
                    "match": {"headers": [{"key": {"exact": "x-key"}, "value": {"exact": looks}}]},
                    "transform": [{"headers": {"x-other": "${secret:deploy}"}}],
                }
            ],
        }
    }


def test_header_values_of_policies_lie_sealed_in_the_store(server: ServerProcess, api: httpx.Client) -> None:
    values = ("set-hunter3", "answer-hunter4", "look-hunter5")
    api.put("/v1/secrets/deploy", params=scoped(), json={"value": VALUE})
    box: Box = create(api, networkPolicy=policy_with_values(*values))
    shown = api.get(f"/v2/sandboxes/{box.name}", params=scoped()).text
    later = ("set-hunter6", "answer-hunter7", "look-hunter8")
    done = api.post(f"{box.path}/network-policy", params=scoped(), json=policy_with_values(*later))
    assert done.status_code == 200, done.text
    done = api.patch(
        f"/v2/sandboxes/{box.name}", params=scoped(), json={"networkPolicy": policy_with_values(*later)}
    )
    assert done.status_code == 200, done.text
    fork = api.post(f"/v2/sandboxes/{box.name}/fork", params=scoped(), json={}).json()["sandbox"]["name"]
    kept = stored_bytes(server.data)
    for value in (*values, *later):
        assert value not in shown and value.encode() not in kept
    assert b"set.test" in kept and "authorization" in shown
    for name in (box.name, fork):
        api.delete(f"/v2/sandboxes/{name}", params=scoped(deleteOrphanSnapshots="true"))
    api.delete("/v1/secrets/deploy", params=scoped())


def answering(value: str) -> dict[str, Any]:
    return {"allow": {"answer.test": [{"response": {"statusCode": 200, "headers": {"x-key": value}}}]}}


def test_policies_of_an_earlier_version_are_sealed_at_start_and_still_apply() -> None:
    secret = "answer-hunter9"
    plain = json.dumps(answering(secret))
    with running_server() as server:
        with server.client() as api:
            box = create(api, networkPolicy={"allow": ["other.test"]})
        server.stop()
        with closing(sqlite3.connect(server.data / "store.db", isolation_level=None)) as db:
            for table in ("sandboxes", "sessions"):
                db.execute(f"UPDATE {table} SET network_policy = ?", (plain,))
            drop_columns_since_sealed_policies(db.execute)
            before = STEPS.index(sealed_policies)
            db.execute("DELETE FROM schema_steps WHERE version > ?", (before,))
            db.execute(f"PRAGMA user_version = {before}")
        assert secret.encode() in stored_bytes(server.data)
        server.start()
        assert secret.encode() not in stored_bytes(server.data)
        with server.client() as api:
            where = f"/v1/sandboxes/{box.name}/resume"
            for given, status in ((secret, 200), ("another", 409)):
                body = {"projectId": PROJECT, "networkPolicy": answering(given)}
                found = api.post(where, params=scoped(), json=body, timeout=ENOUGH)
                assert found.status_code == status, found.text
            assert secret not in found.text


def test_the_key_set_is_public_and_has_no_private_part(server: ServerProcess) -> None:
    with server.client(token="") as anybody:
        (key,) = anybody.get("/.well-known/jwks").json()["keys"]
        assert refused(anybody.get("/v1/secrets")) == (401, "unauthorized")
    assert key["kty"] == "RSA" and key["alg"] == "RS256" and "d" not in key
