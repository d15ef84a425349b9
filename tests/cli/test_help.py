"""Help is complete, matches the reference page and imports little; wrong command lines are explained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import sandkeep
from sandkeep.cli.app import common_values
from sandkeep.cli.framework import Argument, Command, Group, HelpOption
from sandkeep.cli.main import main
from sandkeep.cli.table import ALIASES, COMMANDS, usage
from sandkeep.cli.tree import Root, load
from sandkeep.errors import ServerUnreachable
from tests.cli.program import Program

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cli(tmp_path: Path) -> Program:
    """A data directory without a server; no test here starts one."""
    return Program({"SANDKEEP_HOME": str(tmp_path / "home")})


def every() -> Iterator[tuple[str, Command]]:
    for name in COMMANDS:
        found = load(name)
        if isinstance(found, Group):
            for child, command in found.commands.items():
                assert isinstance(command, Command)
                yield f"{name} {child}", command
        else:
            assert isinstance(found, Command)
            yield name, found


ALL = dict(every())


@pytest.mark.parametrize("path", ALL)
def test_every_command_explains_itself_and_all_it_takes(path: str) -> None:
    command = ALL[path]
    assert command.help
    for param in command.params:
        if isinstance(param, HelpOption):
            assert param.hidden or param.help, param.opts
        else:
            assert isinstance(param, Argument) and param.about, param.name
    text = command.get_help(click.Context(command, info_name=f"sandkeep {path}"))
    for param in command.params:
        if isinstance(param, HelpOption) and not param.hidden:
            assert param.opts[-1] in text
    assert "--debug" in text and "--help" in text
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.parametrize("path", ALL)
def test_examples_are_command_lines_that_can_be_parsed(path: str) -> None:
    import shlex

    for _, line in ALL[path].examples:
        words = shlex.split(line.partition(" < ")[0].partition(" | ")[0])
        if words[0] == "eval":
            words = shlex.split(words[1].strip("$()"))
        assert words[0] == "sandkeep"
        name = ALIASES.get(words[1], words[1])
        command: click.Command = load(name)
        rest = words[2:]
        if isinstance(command, Group):
            command = command.commands[rest.pop(0)]
        command.make_context("sandkeep", rest)


def test_commands_with_results_can_print_json() -> None:
    silent = {"run", "sh", "exec", "connect", "attach", "serve", "completion"}
    for path, command in ALL.items():
        has = any("--json" in param.opts for param in command.params)
        assert has is (path not in silent), path


def test_the_reference_page_matches_the_commands() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "cli_docs.py", "--check"])
    assert done.returncode == 0, "run: python scripts/cli_docs.py"


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(cli: Program, args: list[str]) -> None:
    text = cli(*args).text
    assert text.rstrip("\n") == usage()
    assert all(f"  {name} " in text for name in COMMANDS)


def test_help_of_one_command_in_both_ways(cli: Program) -> None:
    assert cli("ls", "--help").text == cli("help", "ls").text == cli("list", "-h").text


def test_no_command_is_a_mistake(cli: Program) -> None:
    assert cli(status=2).err.startswith("Usage:")
    assert "get-or-create" in cli.fails("drives", status=2)


def test_help_imports_neither_the_sdk_nor_click() -> None:
    code = "import sys; from sandkeep.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"click", "asyncio", "msgspec", "sandkeep.sync", "sandkeep.sdk", "sandkeep.spec"}


def test_the_version_is_printed(cli: Program) -> None:
    assert cli("version").text == cli("--version").text == f"sandkeep {sandkeep.__version__}\n"
    assert cli("version", "--json").json == {"version": sandkeep.__version__}


def test_options_before_a_command_reach_it_without_the_environment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = dict(os.environ)
    leading = [
        "--url",
        "http://127.0.0.1:1",
        "--token",
        "t",
        "--team",
        "a",
        "--project",
        "b",
        "-q",
        "--debug",
    ]
    assert main([*leading, "version", "--json"]) == 0
    assert dict(os.environ) == before
    assert json.loads(capsys.readouterr().out) == {"version": sandkeep.__version__}
    with pytest.raises(ServerUnreachable):  # --debug raises instead of reporting
        main([*leading, "ls"])


def test_an_option_after_the_command_counts_more_than_one_before_it() -> None:
    root = Root()
    with root.make_context("sandkeep", ["--url", "http://before", "--team", "kept", "ls"]) as ctx:
        name, command, rest = root.resolve_command(ctx, ["ls", "--url", "http://after"])
        assert command is not None
        with command.make_context(name, rest, parent=ctx) as inner:
            assert common_values(inner) == {"url": "http://after", "team": "kept"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["lss"], "did you mean 'sandkeep ls'"),
        (["frobnicate"], "'sandkeep --help'"),
        (["lgos"], "did you mean 'sandkeep logs'"),
        (["top"], "'sandkeep ps NAME'"),
        (["inspect"], "'sandkeep config list NAME'"),
        (["rename"], "keeps its name"),
        (["stpo"], "'sandkeep --help' lists"),
        (["rmm"], "'sandkeep --help' lists"),
        (["remov"], "'sandkeep --help' lists"),
        (["kil"], "'sandkeep --help' lists"),
        (["--frobnicate"], "before a command"),
        (["ls", "--al"], "did you mean --all"),
        (["ls", "--limit", "0"], "--limit: must be at least 1"),
        (["ls", "--limit", "many"], "--limit: 'many' is not a whole number"),
        (["ls", "--limit"], "--limit needs a value"),
        (["ls", "--json=1"], "--json takes no value"),
        (["--url"], "--url needs a value"),
        (["login"], "nothing to log in to"),
        (["telemetry"], "nothing is collected"),
        (["ls", "--name-prefix", "a", "--sort-by", "createdAt"], "sorts by name"),
        (["drives", "frobnicate"], "there are ls"),
        (["exec"], "NAME is missing"),
        (["exec", "name"], "sandkeep: COMMAND is missing"),
        (["run"], "sandkeep: COMMAND is missing"),
        (["run", "--name"], "--name needs a value"),
        (["stop"], "sandkeep: NAME is missing"),
        (["kill", "--signal", "NONE", "name"], "--signal: 'NONE' is not a signal"),
        (["run", "--rm", "--stop", "--", "true"], "--rm and --stop"),
        (["run", "--timeout", "5", "true"], "5s or 5m"),
        (["run", "--env", "NOT_SET_ANYWHERE", "true"], "NOT_SET_ANYWHERE"),
        (["run", "--mount", "d", "true"], "DRIVE:/PATH"),
        (["create", "--cpus", "0"], "--cpus: must be between 0.05"),
        (["create", "--memory", "63"], "--memory: must be between 64"),
        (["create", "--disk", "x"], "not a size"),
        (["create", "--best-effort"], "give one of --cpus, --memory, --disk, --pids"),
        (["create", "--pids", "1"], "--pids: must be between 16"),
        (["create", "--vcpus", "2"], "'cpus' and 'memory'"),
        (["create", "--name", "no spaces"], "--name: may contain only letters"),
        (["create", "--allowed-domain", "a b"], "--allowed-domain: 'a b' is not a domain"),
        (["create", "--allowed-cidr", "10.0.0"], "--allowed-cidr: '10.0.0'"),
        (["create", "--tag", "no-value"], "KEY=VALUE"),
        (["create", "--tag", "a=1", "--tag", "a=2"], "--tag: a is given twice"),
        (["sh", "-t", "a=1", "-t", "a=2"], "--tag: a is given twice"),
        (["config", "tags", "name", "-t", "a=1", "-t", "a="], "--tag: a is given twice"),
        (["run", "-e", "A=1", "-e", "B=1", "-e", "A=2", "--", "true"], "--env: A is given twice"),
        (["create", "--mount", "a:/data", "--mount", "b:/data"], "--mount: /data is given twice"),
        (["ls", "--tag", "a=1", "--tag", "a=2"], "--tag: a is given twice with different values"),
        (["rm", "--yes", "--tag", "a=1", "--tag", "a=2"], "--tag: a is given twice with different values"),
        (["rm", "--yes", "--prefix", "a", "--prefix", "b"], "--name-prefix: only one value is allowed"),
        (["drives", "ls", "--name-prefix", "a", "--name-prefix", "b"], "--name-prefix: only one value is"),
        (["create", "--keep-last-snapshots-for", "7d"], "--keep-last-snapshots"),
        (["create", "--network-policy", "deny-all", "--allowed-domain", "a.example"], "--network-policy"),
        (["create", "-p", "70000"], "--publish-port"),
        (["cp", "here", "there"], "NAME:PATH"),
        (["cp", "a:here", "b:there"], "NAME:PATH"),
        (["cp", "", "a:there"], "SOURCE is empty"),
        (["secret", "set", "name"], "no value on standard input"),
        (["snapshot", "name"], "sandkeep checkpoint name"),
        (["create", "--snapshot", ""], "--snapshot: must not be empty"),
        (["snapshots", "ls", "--name", ""], "--name: must not be empty"),
        (["ps", "name", "--all", "--session", "s"], "--session"),
        (["images", "import", "/nowhere", "--name", "x"], "/nowhere"),
        (["images", "pull", "a", "--username", "me"], "SANDKEEP_PASSWORD"),
        (["completion", "tcsh"], "bash"),
        (["ls", "--url", "ftp://example.org"], "--url: 'ftp://example.org' must begin"),
        (["status", "--url", "example.org"], "--url: 'example.org' must begin"),
        (["ls", "extra"], "unexpected: extra"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_says_what_is_wrong(
    cli: Program, args: list[str], said: str
) -> None:
    assert said in cli.fails(*args, status=2)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_script(cli: Program, shell: str) -> None:
    assert "_SANDKEEP_COMPLETE" in cli("completion", shell).text


def test_commands_subcommands_and_options_are_completed(cli: Program) -> None:
    def complete(*words: str) -> list[str]:
        env = {
            "_SANDKEEP_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        return [line.partition(",")[2] for line in cli(env=env).text.splitlines()]

    assert complete("sandkeep", "dr") == ["drives"]
    assert complete("sandkeep", "drives", "f") == ["fork"]
    assert "--name-prefix" in complete("sandkeep", "ls", "--name")
    assert not any(complete("sandkeep", "connect", "x"))
