"""Sandboxes from creation to removal, for people and, with --json, for programs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sandkeep import sync
from tests.cli.program import Program
from tests.polling import until
from tests.server.server_process import ServerProcess


@pytest.fixture
def three(cli: Program, name: str) -> Iterator[list[str]]:
    """Three sandboxes with a common prefix and a label each."""
    names = [f"{name}-{letter}" for letter in "abc"]
    for index, each in enumerate(names):
        cli("create", "--silent", "--name", each, "--tag", f"place={name}-{index}", "-t", "of=three")
    yield names
    cli("rm", "--delete-orphan-snapshots", *names)


def test_events_are_listed_with_who_caused_them(cli: Program, box: str) -> None:
    cli("exec", box, "--", "echo", "a b")
    lines = cli("events", box).text.splitlines()
    assert "sandbox.created" in lines[0] and "command=echo 'a b'" in lines[-1]
    assert "  token:tok_" in lines[0] and box in lines[0]
    [event] = [
        json.loads(line) for line in cli("events", box, "--kind", "process.", "--json").text.splitlines()
    ]
    assert (event["kind"], event["sandboxName"]) == ("process.started", box)
    assert event["data"]["command"] == "echo 'a b'"
    assert any(box in line and "sandbox.created" in line for line in cli("events").text.splitlines())
    assert "no such event" in cli("events", box, "--kind", "drive.").err
    assert "no sandbox named" in cli.fails("events", "no-such-sandbox")


def test_a_sandbox_is_created_listed_stopped_resumed_and_removed(cli: Program, name: str) -> None:
    assert cli("create", "--name", name).text == f"{name}\n"
    assert name in cli("ls", "--name-prefix", name).text
    cli("exec", name, "--", "sh", "-c", "echo kept > kept.txt")
    stopped = cli("stop", name)
    assert stopped.text == f"{name}\n"
    assert "processor time" in stopped.err and "files are kept in snap_" in stopped.err
    assert name not in cli("ls", "--name-prefix", name).text
    assert re.search(rf"{name}\s+stopped", cli("ls", "-a", "--name-prefix", name).text)
    assert cli("exec", name, "cat", "kept.txt").text == "kept\n"
    assert cli("rm", name).text == f"{name}\n"
    assert "sandkeep ls --all" in cli.fails("stop", name)


def test_stop_prints_usage_and_the_snapshot(cli: Program, box: str) -> None:
    cli("exec", box, "--", "sh", "-c", "head -c 300000 /dev/urandom > kept")
    first = cli("stop", box).err
    assert "with 2 CPUs and 4096 MB of memory" in first and "all its sessions" not in first
    assert re.search(r"kept in snap_\S+: [23]\d\d KiB, expires in \d+ days", first)
    cli("config", "snapshot-expiration", box, "none")
    cli("exec", box, "true")
    stopped = cli("stop", "--json", box).json[0]
    used, total = stopped["session"]["usage"], stopped["total"]
    assert total["duration"] > used["duration"] > 0
    again = cli("stop", box).err
    assert "all its sessions: ran" in again and "never expires" in again
    assert "Used so far" in cli("config", "list", box).text


def test_listings_end_with_a_total(cli: Program, name: str, three: list[str]) -> None:
    listed = cli("ls", "--name-prefix", name)
    assert "MEMORY" in listed.text and listed.text.count("4096 MB") == 3
    assert "3 sandboxes, 3 running with 6 CPUs and 12288 MB of memory" in listed.err
    cli("stop", three[0])
    assert "3 sandboxes, 2 running with 4 CPUs" in cli("ls", "--all", "--name-prefix", name).err
    part = cli("ls", "--all", "--name-prefix", name, "--limit", "2").err
    assert "More results" in part and "sandboxes," not in part
    assert cli("ls", "-q", "--name-prefix", name).err == ""


def test_a_taken_name_is_refused_with_a_hint(cli: Program, box: str) -> None:
    told = cli.fails("create", "--name", box)
    assert f"sandkeep connect {box}" in told and "another name" in told
    assert "sandkeep rm" not in told, "nobody is led to delete what they have"


def test_creation_tells_programs_everything(cli: Program, name: str) -> None:
    made = cli(
        "create", "--json", "--name", name, "--cpus", "4", "--timeout", "10m", "-t", "a=b", "-p", "3000",
        "--best-effort", "--non-persistent", "--snapshot-expiration", "none", "--keep-last-snapshots", "3",
        "--keep-last-snapshots-for", "7d", "--delete-evicted-snapshots", "false",
        "--network-policy", "deny-all",
    ).json  # fmt: skip
    cli("rm", name)
    assert made["name"] == name and made["status"] == "running" and made["persistent"] is False
    assert made["resources"] == {"cpus": 4, "memoryMb": 4096, "diskMb": None, "pids": None, "exact": False}
    assert made["executionTimeLimit"] == 600 and made["snapshotExpiration"] == 0
    assert made["snapshotRetention"] == {"count": 3, "expiration": 604800, "deleteEvicted": False}
    assert made["tags"] == {"a": "b"} and made["networkPolicy"]["mode"] == "deny-all"
    assert [route["port"] for route in made["routes"]] == [3000]


def test_a_sandbox_without_a_name_gets_one(cli: Program) -> None:
    made = cli("create", "-q").text.strip()
    assert made and "\n" not in made
    cli("rm", made)


def test_a_listing_prints_the_command_for_its_next_page(cli: Program, name: str, three: list[str]) -> None:
    page = cli("ls", "--name-prefix", name, "--limit", "2")
    more = shlex.split(page.err.partition("More results: ")[2])
    assert more[:2] == ["sandkeep", "ls"]
    assert three[0] in page.text and three[1] in page.text and three[2] not in page.text
    rest = cli(*more[1:])
    assert three[2] in rest.text and three[0] not in rest.text and "More results" not in rest.err


def test_a_list_shows_all_there_is(server: ServerProcess, cli: Program, name: str) -> None:
    """More than the server gives at once: for people, for programs, and as names for a script."""
    made = [f"{name}-{number:03}" for number in range(103)]
    with sync.Client(server.url, token=server.token) as client:
        for each in made:
            client.get_or_create_drive(each)
        narrowed = ["drives", "ls", "--name-prefix", name]
        table = cli(*narrowed)
        assert [line.split()[0] for line in table.text.splitlines()[1:]] == made and not table.err
        listed = cli(*narrowed, "--json").json
        assert [each["name"] for each in listed["drives"]] == made and listed["next"] is None
        assert cli(*narrowed, "-q").text.splitlines() == made
        some = cli(*narrowed, "--limit", "101")
        assert len(some.text.splitlines()) == 102 and "More results: " in some.err
        rest = cli(*shlex.split(some.err.partition("More results: ")[2])[1:], "-q")
        assert rest.text.splitlines() == made[101:]
        for each in made:
            client.delete_drive(each)


def test_lists_for_programs_have_items_and_a_cursor(cli: Program, name: str, three: list[str]) -> None:
    first = cli("ls", "--json", "--name-prefix", name, "--limit", "2").json
    assert [each["name"] for each in first["sandboxes"]] == three[:2]
    last = cli("ls", "--json", "--name-prefix", name, "--limit", "2", "--cursor", first["next"]).json
    assert [each["name"] for each in last["sandboxes"]] == three[2:] and last["next"] is None


def test_lists_are_narrowed_and_sorted(cli: Program, name: str, three: list[str]) -> None:
    tagged = cli("ls", "--json", "--tag", f"place={name}-1").json
    assert [each["name"] for each in tagged["sandboxes"]] == [three[1]]
    down = cli("ls", "--json", "--name-prefix", name, "--sort-order", "desc").json
    assert [each["name"] for each in down["sandboxes"]] == three[::-1]
    assert "--all also looks" in cli("ls", "--tag", "no=such").err
    assert cli("ls", "--all", "--tag", "no=such").err == "no such sandbox\n"


def test_one_failure_does_not_stop_the_others(cli: Program, name: str, three: list[str]) -> None:
    done = cli("stop", "--json", three[0], f"{name}-none", three[1], status=1).json
    assert [each.get("error", {}).get("code") for each in done] == [None, "not_found", None]
    assert done[0]["session"]["status"] == "stopped" and done[0]["snapshot"]["id"].startswith("snap_")
    gone = cli("rm", "--json", f"{name}-none", status=1).json
    assert gone[0]["error"]["code"] == "not_found"


def test_removing_by_tag_or_prefix_needs_confirmation(cli: Program, name: str, three: list[str]) -> None:
    assert "confirm with --yes" in cli.fails("rm", "--prefix", f"{name}-", status=2)
    assert "--all, --tag or --prefix" in cli.fails("rm", status=2)
    assert "--all, --tag or --prefix" in cli.fails("rm", "--all", three[0], status=2)
    assert cli("ls", "-q", "--name-prefix", name).text.split() == three
    both = ["--tag", f"place={name}-1", "--tag", "of=three"]
    assert cli("rm", *both, "--tag", "no=such", "--yes").err == "no such sandbox\n"
    assert "place is given twice" in cli.fails("rm", *both, "--tag", "place=x", "--yes", status=2)
    assert cli("ls", "-q", *both).text.split() == [three[1]]
    assert cli("rm", *both, "--yes").text.split() == [three[1]]
    assert cli("ls", "-q", "--name-prefix", name).text.split() == [three[0], three[2]]
    done = cli("rm", "--json", "--prefix", f"{name}-", "-y").json
    assert done == [{"name": each, "removed": True} for each in (three[0], three[2])]
    assert cli("rm", "--prefix", f"{name}-", "--yes").err == "no such sandbox\n"
    for each in three:
        cli("create", "--silent", "--name", each)


def test_removing_all_asks_on_a_terminal(server: ServerProcess, cli: Program, name: str) -> None:
    project = ["--project", name]
    local = Program({"SANDKEEP_URL": f"unix://{server.socket}"})
    local("create", "--silent", "--name", "one", *project)
    asked = local.on_terminal("rm", "--all", *project, status=1, typed=b"n\n")
    assert b"Remove 1 sandbox for good (one)?" in asked
    assert local("ls", "--all", "-q", *project).text == "one\n"
    local.on_terminal("rm", "--all", *project, typed=b"y\n")
    assert local("ls", "--all", "-q", *project).text == ""


def test_rm_says_that_snapshots_are_kept(cli: Program, name: str) -> None:
    for options, stay in ([], True), (["--delete-orphan-snapshots"], False):
        cli("create", "--silent", "--name", name)
        kept = cli("stop", "--json", name).json[0]["snapshot"]["id"]
        assert ("snapshots are kept until they expire" in cli("rm", name, *options).err) is stay
        assert (cli("snapshots", "get", kept, "--json").json["status"] == "created") is stay
        cli("snapshots", "rm", kept)


def test_a_fork_has_the_files_and_other_settings_where_asked(cli: Program, box: str) -> None:
    cli("exec", box, "--", "sh", "-c", "echo here > file")
    for options, said, found in (([], True, 1), (["--live"], False, 0)):
        forked = cli("fork", box, "--name", f"{box}-2", *options)
        try:
            assert ("--live includes them" in forked.err) is said
            cli("exec", f"{box}-2", "test", "-e", "file", status=found)
        finally:
            cli("rm", f"{box}-2")
    cli("stop", box)
    try:
        made = cli("fork", "--json", box, "--name", f"{box}-2", "--cpus", "4", "--best-effort").json
        assert made["resources"]["cpus"] == 4
        assert cli("exec", f"{box}-2", "cat", "file").text == "here\n"
        assert "exists" in cli.fails("fork", box, "--name", f"{box}-2")
        cli.fails("fork", f"{box}-none")
    finally:
        cli("rm", f"{box}-2")


CHANGES: list[tuple[list[str], Callable[[Any], bool]]] = [
    (["cpus", "0.5", "--best-effort"], lambda found: found["resources"]["cpus"] == 0.5),
    (["memory", "1g", "--best-effort"], lambda found: found["resources"]["memoryMb"] == 1024),
    (["disk", "2g", "--best-effort"], lambda found: found["resources"]["diskMb"] == 2048),
    (["disk", "none", "--best-effort"], lambda found: found["resources"]["diskMb"] is None),
    (["disk", "2g", "--best-effort"], lambda found: found["resources"]["diskMb"] == 2048),
    (["pids", "100", "--best-effort"], lambda found: found["resources"]["pids"] == 100),
    (["timeout", "1h30m"], lambda found: found["executionTimeLimit"] == 5400),
    (["idle-timeout", "45m"], lambda found: found["idleTimeout"] == 2700),
    (["persistent", "false"], lambda found: found["persistent"] is False),
    (["tags", "-t", "x=1", "--tag", "y_z=2"], lambda found: found["tags"] == {"x": "1", "y_z": "2"}),
    (["tags"], lambda found: found["tags"] == {}),
    (["ports", "-p", "4000"], lambda found: [route["port"] for route in found["routes"]] == [4000]),
    (["env", "-e", "A=b"], lambda found: True),
    (["mounts"], lambda found: found["mounts"] == {}),
    (["delete-after", "12h"], lambda found: found["deleteAfter"] == 43200 and found["deleteAt"]),
    (["delete-after", "none"], lambda found: found["deleteAt"] is None),
    (["destroy-on-stop", "true"], lambda found: found["destroyOnStop"] is True),
    (["destroy-on-stop", "false"], lambda found: found["destroyOnStop"] is False),
    (["snapshot-expiration", "7d"], lambda found: found["snapshotExpiration"] == 604800),
    (["keep-last-snapshots", "3"], lambda found: found["snapshotRetention"]["count"] == 3),
    (["keep-last-snapshots-for", "none"], lambda found: found["snapshotRetention"]["expiration"] == 0),
    (["delete-evicted-snapshots", "false"], lambda found: not found["snapshotRetention"]["deleteEvicted"]),
    (["keep-last-snapshots", "0"], lambda found: found["snapshotRetention"] is None),
    (["network-policy", "--mode", "deny-all"], lambda found: found["networkPolicy"]["mode"] == "deny-all"),
    (
        ["network-policy", "--allowed-domain", "*.example.com", "--denied-cidr", "10.0.0.0/8"],
        lambda found: found["networkPolicy"]["domains"] == ["*.example.com"],
    ),
]


def test_every_configuration_can_be_changed(cli: Program, box: str) -> None:
    for (field, *value), holds in CHANGES:
        found = cli("config", field, box, *value, "--json").json
        assert holds(found), (field, found)
    shown = cli("config", "list", box).text
    for part in (
        "1h 30m",
        "45m",
        "0.5",
        "1024 MB",
        "2048 MB",
        "100",
        "4000",
        "restricted: *.example.com, not 10.0.0.0/8",
    ):
        assert part in shown, shown
    assert cli("config", "list", box, "--json").json["executionTimeLimit"] == 5400
    assert cli("config", "idle-timeout", box, "none", "--json").json["idleTimeout"] is None


@pytest.mark.slow
@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_a_sandbox_with_an_idle_timeout_ends_when_nothing_uses_it(
    cli: Program, local: Program, name: str, over: str
) -> None:
    program = cli if over == "tcp" else local
    made = program("create", "--name", name, "--idle-timeout", "5s", "--json").json
    try:
        assert made["idleTimeout"] == 5
        fork = program("fork", "--json", name, "--name", f"{name}-2", "--idle-timeout", "none").json
        program("rm", f"{name}-2")
        assert fork["idleTimeout"] is None
        until(lambda: program("config", "list", name, "--json").json["status"] == "stopped")
        [session] = program("sessions", "ls", name, "--all", "--json").json["sessions"]
        assert (session["stopReason"], session["idleTimeout"]) == ("idle", 5)
        assert (
            "5000, and 9000" in program("run", "--name", name, "--idle-timeout", "9s", "true", status=125).err
        )
    finally:
        program("rm", name)


@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_a_sandbox_that_is_destroyed_on_stop_is_gone_after_it(
    cli: Program, local: Program, name: str, over: str
) -> None:
    program = cli if over == "tcp" else local
    made = program("create", "--name", name, "--destroy-on-stop", "--delete-after", "1h", "--json").json
    assert made["destroyOnStop"] and made["deleteAfter"] == 3600
    assert "files are kept" not in program("stop", name).err
    until(lambda: "no such sandbox" in program("ls", "--all", "--name-prefix", name).err)


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (["cpus", "{}", "0"], 2),
        (["vcpus", "{}", "2"], 2),
        (["timeout", "{}", "5"], 2),
        (["persistent", "{}", "maybe"], 2),
        (["keep-last-snapshots-for", "{}", "7d"], 2),
        (["network-policy", "{}"], 2),
        (["current-snapshot", "{}", "snap_none"], 1),
        (["timeout", "no-such-sandbox", "5m"], 1),
    ],
)
def test_invalid_configuration_is_refused(cli: Program, box: str, args: list[str], status: int) -> None:
    cli.fails("config", *(arg.format(box) for arg in args), status=status)


def test_quiet_leaves_results_only(cli: Program, box: str) -> None:
    done = cli("-q", "stop", box)
    assert (done.text, done.err) == (f"{box}\n", "")


def test_colours_and_cursor_movements_stay_out_of_pipes(cli: Program, box: str) -> None:
    for done in (cli("ls"), cli("stop", box), cli("ls", env={"TERM": "xterm-256color"})):
        assert b"\x1b" not in done.out and "\x1b" not in done.err


def test_options_of_other_tools_do_nothing_or_are_refused_with_a_reason(cli: Program, name: str) -> None:
    where = ["--region", "fra1", "--failover-regions", "sfo1,hnd1"]
    cli("create", "--name", name, *where)
    cli("fork", name, "--name", f"{name}-2", *where)
    cli("rm", name, f"{name}-2")
    cli("run", *where, "--", "true")
    cli("drives", "get-or-create", name, "--region", "fra1")
    cli("drives", "rm", name)
    assert "no private networks" in cli.fails("create", "--network-id", "net_1", status=2)
    assert "no private networks" in cli.fails("config", "network-id", name, "net_1", status=2)
    assert "where their server is" in cli.fails("config", "region", name, "fra1", status=2)


def test_a_team_has_projects_of_its_own(cli: Program, local: Program, name: str) -> None:
    local("create", "--name", name, "--team", "others")
    assert name not in local("ls", "--all").text
    for asked in (["ls", "--all", "--scope", "others"], ["--team", "others", "ls", "--all"]):
        assert name in local(*asked).text
    assert name in local("ls", "--all", env={"SANDKEEP_TEAM": "others"}).text
    assert f"no sandbox named {name}" in local.fails("rm", name)
    assert "is not valid for team" in cli.fails("rm", name, "--scope", "others")
    local("rm", name, "--scope", "others")


def test_many_forks_are_made_at_once(cli: Program, name: str, box: str) -> None:
    forks = [f"{name}-fork-{number}" for number in (1, 2, 3)]
    assert cli("fork", box, "--live", "--name", f"{name}-fork", "--count", "3").text.split() == forks
    assert len(cli("snapshots", "ls", "--name", box, "--json").json["snapshots"]) == 1
    assert "exists" in cli.fails("fork", box, "--name", f"{name}-fork", "--count", "5")
    assert cli("ls", "-q", "--name-prefix", f"{name}-fork").text.split() == forks
    made = cli("fork", box, "--count", "2", "--json").json
    assert len({each["name"] for each in made}) == 2
    assert "--connect" in cli.fails("fork", box, "--count", "2", "--connect", status=2)
    cli("rm", *forks, *(each["name"] for each in made), "--delete-orphan-snapshots")


def test_pruning_removes_what_stopped_long_ago_and_what_no_sandbox_has(local: Program, name: str) -> None:
    project = ["--project", name]
    for each in ("runs", "stopped", "gone", "tagged"):
        local("create", "--silent", "--name", each, "--tag", f"is={each}", *project)
    local("stop", "stopped", "gone", "tagged", *project)
    local("rm", "gone", *project)
    [orphan] = [
        each["id"]
        for each in local("snapshots", "ls", "--json", *project).json["snapshots"]
        if each["id"] in local("prune", "--older-than", "0", "--dry-run", "-q", *project).text
    ]
    assert local("prune", *project).err == "nothing to remove\n"
    assert "confirm with --yes" in local.fails("prune", "--older-than", "0", *project, status=2)
    shown = local("prune", "--older-than", "0", "--dry-run", *project)
    assert "stopped" in shown.text and orphan in shown.text and "runs" not in shown.text
    assert "would remove 2 stopped sandboxes and 1 snapshot of" in shown.err
    assert local("prune", "--older-than", "0", "--tag", "is=tagged", "--yes", *project).text == "tagged\n"
    done = local("prune", "--older-than", "0", "--yes", "--json", *project).json
    assert done == [{"name": "stopped", "removed": True}, {"name": orphan, "removed": True}]
    assert local("ls", "--all", "-q", *project).text.split() == ["runs"]
    left = local("snapshots", "ls", "--json", *project).json["snapshots"]
    assert {each["status"] for each in left} == {"deleted"}
    local("rm", "runs", *project)
