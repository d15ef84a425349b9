"""Which server is used: none yet, one started by hand, one that is not there, one that wants a token."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandkeep import embedded
from tests.cli.program import Program
from tests.conftest import User, remove_tree
from tests.sdk.tls import Authority, TlsFront
from tests.server.server_process import PROJECT, TEAM, ServerProcess


@pytest.fixture
def alone(able: None) -> Iterator[Program]:
    """A data directory without a server: the first command that needs one starts it."""
    directory = tempfile.mkdtemp(prefix="cli-")
    program = Program({"SANDKEEP_HOME": directory})
    yield program
    if embedded.ask(directory, "GET", "/version") is not None:
        for found in program("ls", "--all", "--json").json["sandboxes"]:
            program("rm", found["name"])
        pid = int(Path(directory, "server.lock").read_text())
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while embedded.ask(directory, "GET", "/version") is not None or os.path.exists(f"/proc/{pid}"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    remove_tree(directory)


def test_the_first_command_starts_what_it_needs(alone: Program) -> None:
    before = alone("status", "--json").json
    assert before["running"] is False and before["embedded"] is True
    assert "does not run" in alone("status").text and before["dataDirectory"] == alone.env["SANDKEEP_HOME"]
    assert alone("run", "--", "python3", "-c", "print('hello')").text == "hello\n"
    after = alone("status", "--json").json
    assert after["running"] is True and after["embedded"] is True and after["sandboxes"] == 0
    alone("create", "--name", "kept", "-q")
    assert alone("status", "--json").json["sandboxes"] == 1
    assert "1 sandbox" in alone("status").text
    assert alone("exec", "-i", "kept", "cat", input=b"in").out == b"in"
    assert alone("stop", "kept", "--json").json[0]["snapshot"]["id"].startswith("snap_")
    shown = alone("status").text
    assert f"Data     {alone.env['SANDKEEP_HOME']}" in shown
    assert "Kept     1 sandbox, 1 snapshot, no drives, no images, " in shown and "MiB" in shown
    kept = alone("status", "--json").json["kept"]
    assert kept["complete"] is True and kept["bytes"] > 1 << 20
    nowhere = Program({"SANDKEEP_HOME": f"{alone.env['SANDKEEP_HOME']}/none"})
    assert "Kept    nothing yet" in nowhere("status").text


@pytest.mark.parametrize("kind", ["ordinary_user", "single_user"])
def test_an_ordinary_user_needs_nothing_set_up(request: pytest.FixtureRequest, kind: str) -> None:
    user: User = request.getfixturevalue(kind)
    # Of its own: other tests share the user's usual data directory and go on using it.
    data = str(user.home / "nothing-set-up")

    def sandkeep(*args: str) -> str:
        done = user.run([user.interpreter, "-m", "sandkeep", *args], env={"SANDKEEP_HOME": data})
        assert done.returncode == 0, done.stderr
        return done.stdout

    can = user.run([user.interpreter, "-m", "sandkeep", "doctor", "--json"])
    if can.returncode:
        pytest.skip(f"sessions of {user.name} cannot run here: see sandkeep doctor")
    try:
        assert sandkeep("run", "--", "python3", "-c", "print('hello')") == "hello\n"
        sandkeep("run", "--name", "kept", "--stop", "--", "sh", "-c", "echo mine > file")
        assert sandkeep("exec", "kept", "cat", "file") == "mine\n"
        sandkeep("rm", "kept")
    finally:
        pid = int(Path(data, "server.lock").read_text())
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while os.path.exists(f"/proc/{pid}"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        shutil.rmtree(data, ignore_errors=True)  # what is left of a range of ids goes with the user's home


def test_a_data_directory_on_the_command_line_counts_most(
    alone: Program, server: ServerProcess, name: str
) -> None:
    other = Program({"SANDKEEP_URL": "http://127.0.0.1:1"})
    found = other("status", "--data-dir", str(server.data), "--json").json
    assert found["running"] is True and found["dataDirectory"] == str(server.data)
    assert (
        other("--data-dir", alone.env["SANDKEEP_HOME"], "ls", "--url", f"unix://{server.socket}").status == 0
    )


def test_status_of_a_server_started_by_hand(cli: Program, local: Program, server: ServerProcess) -> None:
    for program, url in ((cli, server.url), (local, f"unix://{server.socket}")):
        found = program("status", "--json").json
        assert (found["running"], found["embedded"], found["url"]) == (True, False, url)
        assert "started by hand" in program("status").text


def test_a_server_that_does_not_answer(cli: Program) -> None:
    gone = {"SANDKEEP_URL": "http://127.0.0.1:1"}
    assert "sandkeep status" in cli.fails("ls", env=gone)
    cli.fails("run", "true", status=125, env=gone)
    assert cli("status", "--json", status=1, env=gone).json["running"] is False
    cli.fails("ls", env={"SANDKEEP_URL": "unix:///no/such/socket"})


def test_a_token_is_needed_and_can_be_given_in_three_ways(cli: Program, server: ServerProcess) -> None:
    without = Program({"SANDKEEP_URL": server.url})
    assert "sandkeep token create" in without.fails("ls")
    without("ls", "--token", server.token)
    without("--token", server.token, "ls")
    without("ls", env={"SANDKEEP_TOKEN": server.token})
    assert "sandkeep token create" in without.fails("exec", "x", "true", status=125)
    assert "token is needed" in without("status").text
    assert without("status", "--json").json["sandboxes"] is None


def test_the_hint_for_more_does_not_show_the_token(server: ServerProcess, cli: Program, name: str) -> None:
    for letter in "ab":
        cli("create", "-q", "--name", f"{name}-{letter}")
    without = Program({"SANDKEEP_URL": server.url})
    page = without("ls", "--token", server.token, "--name-prefix", name, "--limit", "1")
    assert "More results: sandkeep ls" in page.err and server.token not in page.err
    cli("rm", f"{name}-a", f"{name}-b")


def test_tokens_are_made_listed_and_revoked(server: ServerProcess) -> None:
    here = Program({"SANDKEEP_HOME": str(server.data)})
    made = here(
        "token", "create", "--team", TEAM, "--project", PROJECT, "--name", "ci", "--expires", "30d", "--json"
    )
    token, number = made.json["token"], made.json["id"]
    using = Program({"SANDKEEP_URL": server.url, "SANDKEEP_TOKEN": token})
    using("ls")
    found = {each["id"]: each for each in here("token", "ls", "--team", TEAM, "--json").json}
    assert (found[number]["name"], found[number]["state"]) == ("ci", "valid")
    assert token not in here("token", "ls", "--team", TEAM).text
    assert "in 30 days" in here("token", "list", "--team", TEAM).text
    assert here("token", "revoke", number, "--team", TEAM, "--json").json["state"] == "revoked"
    using.fails("ls")
    assert "sandkeep token ls" in here.fails("token", "revoke", "tok_none", "--team", TEAM)
    assert here("token", "create", "--team", "t", "--project", "p").text.startswith("sk_")
    assert "no tokens" in here("token", "ls", "--team", "nobody").err


def test_a_token_can_be_created_while_no_server_runs_and_none_is_left_running(alone: Program) -> None:
    made = alone("token", "create", "--name", "early", "--json").json
    assert alone("status", "--json").json["running"] is False
    assert not embedded.is_served(alone.env["SANDKEEP_HOME"])
    assert [each["id"] for each in alone("token", "ls", "--json").json] == [made["id"]]
    alone("create", "-q", "--name", "kept")
    assert alone("token", "revoke", made["id"]).text == f"revoked {made['id']}\n"
    assert alone("status", "--json").json["sandboxes"] == 1


def test_tokens_are_those_of_the_server_in_use(local: Program, cli: Program, server: ServerProcess) -> None:
    listed = [each["id"] for each in local("token", "ls", "--team", TEAM, "--json").json]
    assert listed and listed == [
        each["id"]
        for each in cli("token", "ls", "--team", TEAM, "--data-dir", str(server.data), "--json").json
    ]
    for command in (["ls"], ["create"], ["revoke", listed[0]]):
        said = cli.fails("token", *command)
        assert server.url in said and "run this there" in said


def test_status_says_what_is_wrong_with_a_server(cli: Program, server: ServerProcess, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    with TlsFront(authority.server_context(), server.url) as front:
        env = {"SANDKEEP_URL": front.url}
        said = cli("status", status=1, env=env).text
        assert "is not trusted" in said and "SSL_CERT_FILE" in said
        assert "certificate" in cli("status", "--json", status=1, env=env).json["problem"]
        assert cli("status", env={**env, "SSL_CERT_FILE": str(authority.file)}).text.split()[1] == "runs,"
    assert "refused" in cli("status", status=1, env={"SANDKEEP_URL": "http://127.0.0.1:1"}).text
    beside = {"SANDKEEP_URL": f"{server.url}/v1/images"}
    assert "as no sandkeep server does" in cli("status", status=1, env=beside).text


def test_a_token_is_by_default_for_what_is_seen_without_one(
    server: ServerProcess, local: Program, name: str
) -> None:
    here = Program({"SANDKEEP_HOME": str(server.data)})
    made = here("token", "create", "--name", name, "--json").json
    local("create", "-q", "--name", name)
    using = Program({"SANDKEEP_URL": server.url, "SANDKEEP_TOKEN": made["token"]})
    assert using("ls", "--name-prefix", name, "--json").json["sandboxes"][0]["name"] == name
    using("rm", name)
    assert made["id"] in [each["id"] for each in here("token", "ls", "--json").json]
    assert here("token", "revoke", made["id"]).text == f"revoked {made['id']}\n"
    using.fails("ls")


def test_names_are_completed_from_a_server_that_runs(cli: Program, box: str) -> None:
    words = {
        "_SANDKEEP_COMPLETE": "bash_complete",
        "COMP_WORDS": f"sandkeep connect {box[:4]}",
        "COMP_CWORD": "2",
    }
    assert f"plain,{box}" in cli(env=words).text.splitlines()


def test_serve_refuses_what_it_cannot_do(server: ServerProcess, tmp_path: Path) -> None:
    here = Program({"SANDKEEP_HOME": str(server.data)})
    here.fails("serve", status=1)
    here.fails("serve", "--port", "70000", status=2)
    (tmp_path / "bad.json").write_text("{")
    here.fails("serve", "--data-dir", str(tmp_path), "--settings", str(tmp_path / "bad.json"), status=2)


def test_doctor_answers_people_and_programs(cli: Program, tmp_path: Path) -> None:
    report = cli("doctor", "--json", "--data-dir", str(tmp_path)).json
    assert report["can_run"] is True
    assert "Sessions can run here" in cli("doctor", "--data-dir", str(tmp_path)).text
