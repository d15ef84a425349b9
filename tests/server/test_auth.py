"""Who may do what: tokens, projects, the unix socket."""

from __future__ import annotations

import base64
import json
import os
import subprocess

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from sandkeep.server.auth import INFERRED_PROJECT, load_key
from sandkeep.shared.jwt import sign_hs256, verify_hs256
from tests.conftest import IS_ROOT, User
from tests.polling import ENOUGH, until
from tests.server.conftest import Box, scoped
from tests.server.server_process import PROJECT, TEAM, ServerProcess


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_without_a_valid_token_nothing_is_answered(server: ServerProcess) -> None:
    for token in ("", "nonsense", "sk_" + "x" * 43, "a.b.c", "é"):
        headers = {b"authorization": f"Bearer {token}".encode()} if token else {}
        with httpx.Client(base_url=server.url, headers=headers) as client:
            answer = client.get("/v2/sandboxes", params=scoped())
            assert refused(answer) == (401, "unauthorized"), token
            assert answer.headers["www-authenticate"] == "Bearer"
    with server.client(token="") as client:
        assert client.get("/health").status_code == 200
        assert client.get("/openapi.json").status_code == 200


def test_an_opaque_token_and_a_jwt_do_the_same(server: ServerProcess, box: Box) -> None:
    for token in (server.make_token(), server.make_token("--jwt")):
        with server.client(token) as client:
            assert client.get(f"/v2/sandboxes/{box.name}", params=scoped()).status_code == 200
            assert client.get(f"/api/v2/sandboxes/{box.name}").status_code == 200


def test_the_jwt_carries_the_scope_clients_read(server: ServerProcess) -> None:
    payload = server.token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    assert (claims["owner_id"], claims["project_id"]) == (TEAM, PROJECT)
    assert claims["exp"] - claims["iat"] > 365 * 86400


def test_a_revoked_or_expired_token_is_as_unknown_as_any_other(server: ServerProcess) -> None:
    made = server.token_command("create", "--team", TEAM, "--project", PROJECT, "--jwt")
    with server.client(made["token"]) as client:
        assert client.get("/v2/user").status_code == 200
        shown = server.token_command("revoke", made["id"], "--team", TEAM)
        assert shown["state"] == "revoked"
        assert refused(client.get("/v2/user")) == (401, "unauthorized")
    listed = {token["id"]: token["state"] for token in server.token_command("ls", "--team", TEAM)}
    assert listed[made["id"]] == "revoked"
    with server.client() as client:
        params = scoped(kindPrefix="token.")
        events = client.get("/v1/events", params=params).json()["events"]
    kinds = [event["kind"] for event in events if event["data"]["token"] == made["id"]]
    assert kinds == ["token.revoked", "token.created"]
    assert {event["actor"] for event in events} == {f"user:{os.geteuid()}"}
    short = server.make_token("--expires", "1s")
    with server.client(short) as client:
        subprocess.run(["sleep", "1.1"], check=True)
        assert refused(client.get("/v2/user")) == (401, "unauthorized")


def test_refused_requests_are_logged_with_their_id_who_asked_and_why(server: ServerProcess, box: Box) -> None:
    revoked = server.token_command("create", "--team", TEAM, "--project", PROJECT, "--jwt")
    server.token_command("revoke", revoked["id"], "--team", TEAM)
    used = server.token_command("create", "--team", TEAM, "--project", "prj_refused")
    url = "/v2/sandboxes"
    expected = []
    for token, method, path, params, status, actor, reason in (
        ("", "GET", url, {}, 401, None, "no token"),
        ("sk_nobody", "GET", url, {}, 401, None, "unknown token"),
        (revoked["token"], "GET", url, {}, 401, revoked["id"], "revoked token"),
        (used["token"], "GET", url, scoped(), 403, used["id"], "access_denied: the token is not valid for"),
        (
            used["token"],
            "GET",
            f"{url}/{box.name}",
            {},
            404,
            used["id"],
            f"not_found: no sandbox named {box.name}",
        ),
        (used["token"], "DELETE", "/v1/nothing", {}, 404, None, "no such route"),
        (used["token"], "PATCH", url, {}, 405, None, "method not allowed"),
        (used["token"], "POST", "/v3/sandboxes", {}, 400, used["id"], "invalid_request: "),
    ):
        with server.client(token) as client:
            body = {"name": "x", "timeout": -1} if method == "POST" else None
            answer = client.request(method, path, params=params, json=body)
        assert answer.status_code == status
        expected.append((answer.headers["x-request-id"], status, actor, reason))
    with pytest.raises(InvalidStatus):
        connect(f"ws{server.url.removeprefix('http')}/v2/interactive/{box.session}?token=stolen")
    log = until(lambda: server.log() if "the ticket for the terminal is unknown" in server.log() else "")
    for request, status, actor, reason in expected:
        (line,) = [line for line in log.splitlines() if f"request={request}" in line]
        assert f"status={status}" in line and f'reason="{reason}' in line, line
        assert (f"actor=token:{actor}" in line) == (actor is not None), line
    for text in ("sk_nobody", revoked["token"], used["token"], "stolen"):
        assert text not in log
    assert len({request for request, *_ in expected}) == len(expected)


def test_a_jwt_signed_by_somebody_else_is_refused(server: ServerProcess) -> None:
    claims = {"owner_id": TEAM, "project_id": PROJECT, "exp": 4_000_000_000, "iat": 1}
    forged = sign_hs256(b"k" * 32, claims)
    unregistered = sign_hs256(load_key(str(server.data)), claims)
    header, payload, signature = server.token.split(".")
    unsigned = f"{header}.{payload}."
    tampered = f"{header}.{payload}.{signature[:-2]}AA"
    for token in (forged, unregistered, unsigned, tampered):
        with server.client(token) as client:
            assert refused(client.get("/v2/user")) == (401, "unauthorized")


def test_an_expired_jwt_does_not_verify() -> None:
    text = sign_hs256(b"k" * 32, {"exp": 100})
    assert verify_hs256(b"k" * 32, text, at_ms=99_000) is not None
    assert verify_hs256(b"k" * 32, text, at_ms=100_000) is None


def test_another_projects_things_are_as_absent_as_missing_ones(server: ServerProcess, box: Box) -> None:
    command = box.start("true")
    box.api.post(f"{box.path}/stop")
    snapshot = box.api.get("/v2/sandboxes/snapshots", params=scoped(name=box.name)).json()["snapshots"][0]
    other = server.make_token(project="prj_other")
    with server.client(other) as client:
        for ours, missing in (
            (f"/v2/sandboxes/{box.name}", "/v2/sandboxes/nothing"),
            (f"/v2/sandboxes/sessions/{box.session}", "/v2/sandboxes/sessions/sbx_nothing"),
            (f"{box.path}/cmd/{command['id']}", "/v2/sandboxes/sessions/sbx_x/cmd/cmd_x"),
            (f"{box.path}/cmd/{command['id']}/logs", "/v2/sandboxes/sessions/sbx_x/cmd/cmd_x/logs"),
            (f"/v2/sandboxes/snapshots/{snapshot['id']}", "/v2/sandboxes/snapshots/snap_x"),
        ):
            assert refused(client.get(ours)) == refused(client.get(missing)) == (404, "not_found"), ours
        for action in ("stop", "snapshot", "interactive"):
            assert refused(client.post(f"{box.path}/{action}")) == (404, "not_found")
        assert client.get("/v2/sandboxes").json()["sandboxes"] == []
        assert client.get("/v2/sandboxes/sessions").json()["sessions"] == []
        events = client.get("/v1/events").json()["events"]
        assert [event["kind"] for event in events] == ["token.created"]


def test_a_token_is_refused_in_other_projects_and_teams(server: ServerProcess, api: httpx.Client) -> None:
    for changed in ({"project": "prj_other"}, {"projectId": "prj_nothing"}, {"teamId": "team_other"}):
        assert refused(api.get("/v2/sandboxes", params=changed)) == (403, "forbidden")
    body = {"projectId": "prj_other", "name": "x"}
    assert refused(api.post("/v3/sandboxes", params={"teamId": TEAM}, json=body)) == (403, "forbidden")


def test_the_name_clients_infer_stands_for_the_tokens_project(api: httpx.Client, box: Box) -> None:
    found = api.get(f"/v2/sandboxes/{box.name}", params={"projectId": INFERRED_PROJECT})
    assert found.json()["sandbox"]["projectId"] == INFERRED_PROJECT
    assert api.get(f"/v2/sandboxes/{box.name}").json()["sandbox"]["projectId"] == PROJECT


def test_scope_endpoints_answer_what_the_command_line_asks(api: httpx.Client) -> None:
    assert api.get("/v2/user").json()["user"] == {"defaultTeamId": TEAM, "username": TEAM}
    assert api.get(f"/v2/teams/{TEAM}").json()["slug"] == TEAM
    assert refused(api.get("/v2/teams/team_other")) == (403, "forbidden")
    teams = api.get("/v2/teams", params={"limit": 20}).json()
    assert [team["id"] for team in teams["teams"]] == [TEAM]
    assert teams["pagination"] == {"count": 1, "next": None}
    for answer in (
        api.get(f"/v2/projects/{INFERRED_PROJECT}", params={"teamId": TEAM}),
        api.post("/v11/projects", params={"teamId": TEAM}, json={"name": INFERRED_PROJECT}),
    ):
        assert answer.json()["name"] == INFERRED_PROJECT


def test_the_unix_socket_needs_no_token_and_takes_the_scope_from_the_request(
    server: ServerProcess, box: Box
) -> None:
    with server.local() as client:
        found = client.get(f"/v2/sandboxes/{box.name}", params=scoped())
        assert found.json()["sandbox"]["projectId"] == PROJECT
        assert client.get(f"/v2/sandboxes/sessions/{box.session}", params=scoped()).status_code == 200
        other_team = client.get(f"/v2/sandboxes/sessions/{box.session}", params={"teamId": "team_other"})
        assert refused(other_team) == (404, "not_found")
        assert client.get("/v2/sandboxes", params={"project": "prj_unseen"}).json()["sandboxes"] == []


def test_over_the_unix_socket_ids_of_other_projects_are_not_found(server: ServerProcess, box: Box) -> None:
    """Who names no project acts in the default one, also where an id would say which project it is."""
    command = box.start("sleep", "600")
    snapshot = box.api.post(f"{box.own}/checkpoint").json()["snapshot"]["id"]
    with server.local() as client:
        for method, path in (
            ("GET", f"/v2/sandboxes/sessions/{box.session}"),
            ("GET", f"{box.path}/cmd/{command['id']}"),
            ("GET", f"{box.path}/cmd/{command['id']}/logs"),
            ("POST", f"{box.path}/interactive"),
            ("POST", f"{box.path}/stop"),
            ("GET", f"/v2/sandboxes/snapshots/{snapshot}"),
            ("GET", f"/v2/sandboxes/snapshots/tree?snapshotId={snapshot}"),
            ("DELETE", f"/v2/sandboxes/snapshots/{snapshot}"),
        ):
            assert refused(client.request(method, path)) == (404, "not_found"), path
        assert client.get(f"/v2/sandboxes/snapshots/{snapshot}", params=scoped()).status_code == 200
        made = client.post("/v3/sandboxes", json={"projectId": "default", "name": "of-default"}).json()
        own = made["session"]["id"]
        assert client.get(f"/v2/sandboxes/sessions/{own}").json()["session"]["projectId"] == "default"
        assert client.delete("/v2/sandboxes/of-default").status_code == 200


@pytest.mark.root
def test_the_unix_socket_is_closed_to_other_users(server: ServerProcess, ordinary_user: User) -> None:
    if not IS_ROOT:
        pytest.skip("needs a second user")
    assert os.stat(server.socket).st_mode & 0o777 == 0o600
    code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    assert "PermissionError" in ordinary_user.python(code, server.socket).stderr
    # Even when somebody opens the way to the socket, the kernel tells who is there.
    modes = [(path, path.stat().st_mode & 0o7777) for path in (server.data, server.data / "server.sock")]
    for path, _ in modes:
        path.chmod(0o777)
    try:
        code = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
            "s.sendall(b'GET /v2/user HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n'); print(s.recv(100).decode())"
        )
        done = ordinary_user.python(code, server.socket)
        assert done.stdout.startswith("HTTP/1.1 403 "), done.stderr
    finally:
        for path, mode in modes:
            path.chmod(mode)


def test_what_a_token_keeps_open_ends_with_it(server: ServerProcess) -> None:
    made = server.token_command("create", "--team", TEAM, "--project", PROJECT, "--jwt")
    with server.client() as other, server.client(made["token"]) as client:
        made_box = other.post("/v2/sandboxes", json={"projectId": PROJECT, "name": "revoked"}).json()
        path = f"/v2/sandboxes/sessions/{made_box['session']['id']}"
        opened, late = (client.post(f"{path}/interactive", json={}).json() for _ in range(2))
        with (
            connect(f"{opened['url']}?token={opened['token']}") as terminal,
            client.stream("GET", "/v1/events", params={"follow": "true"}) as events,
        ):
            terminal.send(json.dumps({"type": "start", "command": "sh", "args": [], "env": []}))
            assert terminal.recv(timeout=ENOUGH)
            server.token_command("revoke", made["id"], "--team", TEAM)
            with pytest.raises(httpx.RemoteProtocolError):
                for _ in events.iter_raw():
                    pass
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    terminal.recv(timeout=ENOUGH)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
        with pytest.raises(InvalidStatus):
            connect(f"{late['url']}?token={late['token']}")
        other.delete("/v2/sandboxes/revoked", params=scoped())
