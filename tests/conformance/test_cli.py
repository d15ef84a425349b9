"""The vendor's command line, unmodified except for where it sends its requests."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conformance.clients import Client, Outcome, Server
from tests.conformance.supervisors import kill_supervisor
from tests.server.server_process import ServerProcess

Run = Callable[..., Outcome]


@pytest.fixture
def name() -> str:
    return f"cli-{uuid.uuid4().hex[:10]}"


@pytest.fixture
def cli(cli_client: Client, server: Server, name: str, tmp_path: Path) -> Iterator[Run]:
    """Runs the command line; sandboxes named after the test are removed at its end."""

    def run(*arguments: str, status: int | None = 0, stdin: str | None = None) -> Outcome:
        done = cli_client.run(*arguments, server=server, cwd=tmp_path, stdin=stdin)
        if status is not None:
            assert done.status == status, f"{arguments}: {done.status}\n{done.stdout}\n{done.stderr}"
        return done

    yield run
    for suffix in ("", "-2", "-3"):
        run("rm", name + suffix, "--delete-orphan-snapshots", status=None)


def words(outcome: Outcome) -> str:
    """Everything said, without colours and alignment."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", outcome.stdout + outcome.stderr)
    return re.sub(r"\s+", " ", plain)


def snapshot_in(outcome: Outcome) -> str:
    found = re.search(r"snap_[A-Za-z0-9_-]+", words(outcome))
    assert found, words(outcome)
    return found[0]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.3)


def test_create_exec_and_remove(cli: Run, name: str) -> None:
    assert name in words(cli("create", "--name", name))
    done = cli("exec", name, "--", "sh", "-c", "echo 'out é 😀'; echo err >&2; exit 3", status=3)
    assert done.stdout == "out é 😀\n"
    assert done.stderr.endswith("err\n")
    cli("rm", name)
    assert cli("exec", name, "--", "true", status=None).status != 0


@pytest.mark.parametrize("how", [("--image", "vercel/sandbox/universal"), ("--runtime", "node24")])
def test_create_from_an_image_or_a_runtime(cli: Run, name: str, how: tuple[str, str]) -> None:
    cli("create", "--name", name, *how)
    assert cli("exec", name, "--", "echo", "hi").stdout == "hi\n"


def test_a_duplicate_name_is_refused(cli: Run, name: str) -> None:
    cli("create", "--name", name)
    assert cli("create", "--name", name, status=None).status != 0


def test_a_region_is_not_its_own_replacement(cli: Run, name: str) -> None:
    regions = ("--region", "iad1", "--failover-regions", "iad1")
    assert cli("create", "--name", name, *regions, status=None).status != 0


def test_exec_resumes_a_stopped_sandbox_with_its_files(cli: Run, name: str) -> None:
    cli("create", "--name", name)
    cli("exec", name, "--", "sh", "-c", "echo kept > kept.txt")
    cli("stop", name)
    cli("stop", name)
    assert cli("exec", name, "--", "cat", "kept.txt").stdout == "kept\n"
    listed = words(cli("sessions", "list", name, "--all"))
    assert len(set(re.findall(r"sbx_[A-Za-z0-9_-]+", listed))) == 2


def test_run_creates_finds_and_removes(cli: Run, name: str) -> None:
    assert cli("run", "--name", name, "--", "echo", "one").stdout.endswith("one\n")
    assert cli("run", "--name", name, "--stop", "--", "echo", "two").stdout.endswith("two\n")
    assert cli("run", "--name", name, "--rm", "--", "echo", "three").stdout.endswith("three\n")
    assert name not in words(cli("ls", "--all", "--name-prefix", name, "--sort-by", "name"))


def test_exec_options(cli: Run, name: str) -> None:
    cli("create", "--name", name, "--env", "A=base", "--env", "B=base")
    shown = cli("exec", name, "--env", "B=mine", "--workdir", "/tmp", "--", "sh", "-c", "echo $A $B $PWD")
    assert shown.stdout == "base mine /tmp\n"
    assert cli("exec", name, "--sudo", "--", "id", "-u").stdout == "0\n"
    cli("exec", name, "--timeout", "1s", "--", "sleep", "60", status=137)
    missing = cli("exec", name, "--", "no-such-program", status=None)
    assert missing.status not in (0, 127)


def test_a_run_whose_session_is_lost_ends_with_137(cli: Run, name: str, server: ServerProcess) -> None:
    cli("create", "--name", name)
    found = re.search(r"sbx_[A-Za-z0-9_-]+", words(cli("sessions", "list", name)))
    assert found
    with ThreadPoolExecutor(1) as beside, server.client(params={"teamId": server.team}) as api:
        script = "echo before; touch ready; sleep 60"
        running = beside.submit(cli, "exec", name, "--", "sh", "-c", script, status=137)
        session = f"/v2/sandboxes/sessions/{found[0]}"
        until(lambda: api.post(f"{session}/fs/read", json={"path": "ready"}).status_code == 200)
        kill_supervisor(found[0])
        assert running.result().stdout == "before\n"


def test_large_output_arrives_whole(cli: Run, name: str) -> None:
    cli("create", "--name", name)
    done = cli("exec", name, "--", "sh", "-c", "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done")
    assert done.stdout.split() == [str(number) for number in range(3000)]


def test_copy_both_ways(cli: Run, name: str, tmp_path: Path) -> None:
    cli("create", "--name", name)
    (tmp_path / "up.bin").write_bytes(bytes(range(256)) * 4096)
    cli("cp", "up.bin", f"{name}:/vercel/sandbox/there.bin")
    cli("cp", f"{name}:/vercel/sandbox/there.bin", "down.bin")
    assert (tmp_path / "down.bin").read_bytes() == (tmp_path / "up.bin").read_bytes()
    assert "File not found" in words(cli("cp", f"{name}:/vercel/sandbox/none", "none", status=None))
    assert not (tmp_path / "none").exists()


def test_list_by_prefix_and_tag(cli: Run, name: str) -> None:
    cli("create", "--name", name, "--tag", f"key={name}")
    cli("create", "--name", f"{name}-2")
    both = words(cli("ls", "--name-prefix", name, "--sort-by", "name"))
    assert name in both and f"{name}-2" in both
    tagged = words(cli("ls", "--tag", f"key={name}"))
    assert name in tagged and f"{name}-2" not in tagged
    paged = words(
        cli("ls", "--name-prefix", name, "--sort-by", "name", "--sort-order", "asc", "--limit", "1")
    )
    assert f"{name}-2" not in paged


def test_every_configuration_can_be_changed(cli: Run, name: str) -> None:
    cli("create", "--name", name)
    for change in (
        ("vcpus", name, "4"),
        ("timeout", name, "10m"),
        ("persistent", name, "false"),
        ("tags", name, "--tag", "x=1"),
        ("ports", name, "--publish-port", "4000"),
        ("snapshot-expiration", name, "7d"),
        ("keep-last-snapshots", name, "3"),
        ("keep-last-snapshots-for", name, "7d"),
        ("delete-evicted-snapshots", name, "false"),
        ("network-policy", name, "--network-policy", "deny-all"),
        ("network-policy", name, "--allowed-domain", "example.com", "--denied-cidr", "10.0.0.0/8"),
        ("mounts", name),
    ):
        cli("config", *change)
    shown = words(cli("config", "list", name))
    for part in ("4", "10 minutes", "false", "4000", "restricted"):
        assert part in shown, shown


def test_fork_copies_files_and_configuration(cli: Run, name: str) -> None:
    cli("create", "--name", name, "--env", "WHERE=inherited")
    cli("exec", name, "--", "sh", "-c", "echo kept > kept.txt")
    cli("stop", name)
    cli("fork", name, "--name", f"{name}-2")
    assert (
        cli("exec", f"{name}-2", "--", "sh", "-c", "cat kept.txt; echo $WHERE").stdout == "kept\ninherited\n"
    )
    assert cli("fork", f"{name}-none", "--name", f"{name}-3", status=None).status != 0


def test_snapshots(cli: Run, name: str) -> None:
    cli("create", "--name", name)
    cli("exec", name, "--", "sh", "-c", "echo first > state")
    assert cli("snapshot", name, status=None).status != 0
    first = snapshot_in(cli("snapshot", "--stop", name, "--expiration", "1d"))
    cli("exec", name, "--", "sh", "-c", "echo second > state")
    second = snapshot_in(cli("snapshot", "--stop", name))
    listed = words(cli("snapshots", "list", "--name", name))
    assert first in listed and second in listed
    assert first in words(cli("snapshots", "get", first))
    tree = words(cli("snapshots", "tree", name))
    assert first in tree and second in tree
    cli("create", "--name", f"{name}-2", "--snapshot", first)
    assert cli("exec", f"{name}-2", "--", "cat", "state").stdout == "first\n"
    cli("config", "current-snapshot", name, first)
    assert cli("exec", name, "--", "cat", "state").stdout == "first\n"
    assert cli("config", "current-snapshot", name, "snap_unknown", status=None).status != 0
    cli("snapshots", "rm", second)
    assert "deleted" in words(cli("snapshots", "get", second))


def test_old_snapshots_go_and_the_last_goes_with_the_sandbox(cli: Run, name: str) -> None:
    cli("create", "--name", name, "--keep-last-snapshots", "1")
    first = snapshot_in(cli("snapshot", "--stop", "--expiration", "1d", name))
    cli("exec", name, "--", "true")
    second = snapshot_in(cli("snapshot", "--stop", "--expiration", "0", name))
    until(lambda: "deleted" in words(cli("snapshots", "get", first)))
    assert "deleted" not in words(cli("snapshots", "get", second))
    cli("rm", name, "--delete-orphan-snapshots")
    assert "deleted" in words(cli("snapshots", "get", second))


def test_a_session_that_ran_out_of_time_is_stopped_and_can_be_used_again(cli: Run, name: str) -> None:
    cli("create", "--name", name, "--timeout", "4s")
    cli("exec", name, "--", "sh", "-c", "echo kept > kept.txt")
    until(lambda: "stopped" in words(cli("ls", "--all", "--name-prefix", name, "--sort-by", "name")))
    assert cli("config", "timeout", name, "90d", status=None).status != 0
    cli("config", "timeout", name, "5m")
    assert cli("exec", name, "--", "cat", "kept.txt").stdout == "kept\n"


def test_network_policy_and_ports_at_creation(cli: Run, name: str) -> None:
    made = cli("create", "--name", name, "--allowed-domain", "*.example.com", "-p", "3000")
    assert "3000" in words(made)
    assert "restricted" in words(cli("config", "list", name))


def test_policies_of_domains_and_ranges_are_enforced(cli: Run, name: str, sources: dict[str, str]) -> None:
    def fetched(host: str) -> str:
        url = f"http://{host}:{sources['WEB_PORT']}/echo"
        return cli("exec", name, "--", "curl", "-s", "-m", "60", url, status=None).stdout

    cli("create", "--name", name, "--allowed-domain", "one.test")
    assert (fetched("one.test"), fetched("two.test")) == ("nothing\n", "")
    denied = ("--allowed-domain", "one.test", "--denied-cidr", "127.0.0.0/8")
    cli("config", "network-policy", name, *denied)
    assert fetched("one.test") == ""


def test_drives(cli: Run, name: str) -> None:
    drive = f"{name}-drive"
    cli("drives", "get-or-create", drive)
    cli("drives", "get-or-create", drive)
    assert drive in words(cli("drives", "ls", "--name-prefix", drive))
    cli("create", "--name", name, "--mount", f"{drive}:/data")
    cli("exec", name, "--", "sh", "-c", "echo here > /data/file")
    assert cli("drives", "rm", drive, status=None).status != 0
    assert cli("create", "--name", f"{name}-2", "--mount", f"{drive}:/data", status=None).status != 0
    cli("stop", name)
    cli("create", "--name", f"{name}-3", "--mount", f"{drive}:/data:snapshot")
    assert cli("exec", f"{name}-3", "--", "cat", "/data/file").stdout == "here\n"
    cli("rm", name)
    cli("rm", f"{name}-3")
    cli("drives", "rm", drive)


def test_an_interactive_command_ends_with_its_exit_code(
    cli: Run, cli_client: Client, server: Server, name: str, tmp_path: Path
) -> None:
    cli("create", "--name", name)
    script = "stty size; read line; echo got $line; exit 4"
    done = cli_client.run_in_terminal(
        "exec", "--interactive", name, "--", "sh", "-c", script, server=server, cwd=tmp_path, typed="hi\r"
    )
    assert "40 120" in done.stdout
    assert "got hi" in done.stdout
    assert done.status == 4


@pytest.mark.parametrize(("program", "status"), [("no-such-program", 127), ("/etc/passwd", 126)])
def test_an_interactive_command_that_cannot_start_is_no_success(
    program: str, status: int, cli: Run, cli_client: Client, server: Server, name: str, tmp_path: Path
) -> None:
    cli("create", "--name", name)
    done = cli_client.run_in_terminal(
        "exec", "--interactive", name, "--", program, server=server, cwd=tmp_path, typed=""
    )
    assert program in done.stdout
    assert done.status == status


def test_connect_gives_a_shell(
    cli: Run, cli_client: Client, server: Server, name: str, tmp_path: Path
) -> None:
    cli("create", "--name", name)
    typed = "echo in''side; exit 5\r"
    done = cli_client.run_in_terminal("connect", name, server=server, cwd=tmp_path, typed=typed)
    assert "inside" in done.stdout
    assert done.status == 5


def test_scope_flags_and_a_token_alone(cli_client: Client, server: Server, tmp_path: Path) -> None:
    without = {"VERCEL_OIDC_TOKEN": "", "VERCEL_AUTH_TOKEN": server.token}
    alone = cli_client.run("ls", server=server, cwd=tmp_path, env=without)
    assert alone.status == 0, alone.stderr
    flags = ["--scope", server.team, "--project", server.project]
    scoped = cli_client.run("ls", *flags, server=server, cwd=tmp_path, env=without)
    assert scoped.status == 0, scoped.stderr


def test_a_token_without_a_scope_in_it_is_enough(
    cli_client: Client, server: ServerProcess, name: str, tmp_path: Path
) -> None:
    """The command line asks who the token stands for, and for the team and project that follow."""
    token = server.make_token()
    assert token.count(".") != 2
    env = {"VERCEL_OIDC_TOKEN": "", "VERCEL_AUTH_TOKEN": token}

    def run(*arguments: str) -> Outcome:
        done = cli_client.run(*arguments, server=server, cwd=tmp_path, env=env)
        assert done.status == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done

    run("create", "--name", name)
    try:
        assert run("exec", name, "--", "echo", "hi").stdout == "hi\n"
        assert name in words(run("ls", "--scope", server.team))
    finally:
        run("rm", name)


def test_logging_in_says_how_to_have_a_token(cli_client: Client, server: Server, tmp_path: Path) -> None:
    env = {"VERCEL_OIDC_TOKEN": "", "HOME": str(tmp_path)}
    for command in ("login", "ls"):
        done = cli_client.run(command, server=server, cwd=tmp_path, env=env)
        assert done.status == 1
        assert "sandkeep token create" in words(done) and "--token" in words(done), words(done)


def test_a_bad_token_is_refused(cli_client: Client, server: Server, tmp_path: Path) -> None:
    flags = ["--token", "not-a-token", "--scope", server.team, "--project", server.project]
    env = {"VERCEL_OIDC_TOKEN": ""}
    assert cli_client.run("ls", *flags, server=server, cwd=tmp_path, env=env).status != 0
