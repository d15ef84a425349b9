"""Commands run as if they ran here: output, input, exit status, signals. Sandboxes end as asked."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from tests.cli.program import Program, command
from tests.polling import ENOUGH, longer_and_longer


def names(cli: Program) -> set[str]:
    return {each["name"] for each in cli("ls", "--all", "--json", "--limit", "100").json["sandboxes"]}


def test_a_command_without_a_name_leaves_no_sandbox(cli: Program) -> None:
    before = names(cli)
    done = cli("run", "--", "sh", "-c", "echo out; echo err >&2; exit 3", status=3)
    assert (done.text, done.err) == ("out\n", "err\n")
    assert names(cli) == before


def test_a_named_sandbox_is_made_found_and_kept(cli: Program, name: str) -> None:
    cli("run", "--name", name, "--", "sh", "-c", "echo one > file")
    again = cli("run", "--name", name, "--stop", "--cpus", "2", "--best-effort", "--", "cat", "file")
    assert again.text == "one\n"
    assert cli("config", "list", name, "--json").json["status"] == "stopped"
    assert cli("run", "--name", name, "--rm", "cat", "file").text == "one\n"
    assert name not in names(cli)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--network-policy", "deny-all"], ("networkPolicy", "allow-all", "deny-all")),
        (["--cpus", "4"], ("resources.cpus", "has 2", "and 4 was asked for")),
        (["--memory", "512m"], ("resources.memoryMb", "has 4096", "and 512 was asked for")),
        (["--non-persistent"], ("persistent", "true", "false")),
        (["-p", "3000"], ("ports", "[]", "[3000]")),
        (["--tag", "a=b"], ("tags", "{}", '{"a": "b"}')),
        (["--timeout", "1h"], ("timeout", "300000", "3600000")),
        (["--runtime", "node24"], ("runtime", "none", "node24")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_option_that_a_named_sandbox_does_not_have_is_refused(
    cli: Program, box: str, options: list[str], named: tuple[str, ...]
) -> None:
    """No command runs under a policy that the caller did not ask for."""
    done = cli("-q", "run", "--name", box, *options, "--", "echo", "ran", status=125)
    assert done.text == ""
    assert all(part in done.err for part in named), done.err
    assert "sandkeep config" in done.err


def test_without_a_name_stop_keeps_it_and_says_how_it_is_called(cli: Program) -> None:
    done = cli("run", "--stop", "--", "true")
    made = done.err.split()[-1]
    assert made in names(cli)
    cli("rm", made)


@pytest.mark.parametrize(
    ("options", "script", "said"),
    [
        (["-e", "A=1", "--env", "B=x y"], 'echo "$A $B"', "1 x y\n"),
        (["-w", "/tmp"], "pwd", "/tmp\n"),
        (["--sudo"], "id -u", "0\n"),
        ([], "cat", ""),
    ],
)
def test_options_of_a_command_take_effect(
    cli: Program, box: str, options: list[str], script: str, said: str
) -> None:
    assert cli("exec", *options, box, "--", "sh", "-c", script).text == said
    assert cli("exec", box, *options, "sh", "-c", script).text == said


def test_a_variable_without_a_value_is_copied_from_the_local_environment(cli: Program, box: str) -> None:
    assert cli("exec", "-e", "MINE", box, "printenv", "MINE", env={"MINE": "here"}).text == "here\n"


def test_dashes_after_the_name_belong_to_the_command(cli: Program, box: str) -> None:
    assert cli("exec", box, "echo", "-e", "--name", "-x", "--", "y").text == "--name -x -- y\n"
    assert cli("run", "--name", box, "echo", "--rm").text == "--rm\n"


def test_a_tag_and_a_terminal_share_a_letter(cli: Program, name: str) -> None:
    done = cli("run", "--name", name, "-t", "a=b", "-it", "--", "echo", "-t", "c=d")
    assert done.text == "-t c=d\n"
    assert cli("config", "list", name, "--json").json["tags"] == {"a": "b"}
    cli("rm", name)


def test_a_shell_has_labels_with_the_same_letter_as_create(cli: Program, name: str) -> None:
    labels = ["-t", "a=1", "-t", "b=2", "-t", "b=2"]
    assert cli("sh", "--name", name, *labels, input=b"echo $((20 + 22))\n").text == "42\n"
    assert cli("config", "list", name, "--json").json["tags"] == {"a": "1", "b": "2"}
    cli("rm", name)


def test_input_is_passed_on_when_asked(cli: Program, box: str) -> None:
    data = bytes(range(256)) * 8192
    assert cli("exec", "-i", box, "--", "cat", input=data).out == data
    assert cli("exec", box, "--", "cat", input=b"not read").out == b""
    assert cli("exec", "-i", box, "--", "true", input=data).out == b""


def test_output_is_whole_and_exact(cli: Program, box: str) -> None:
    done = cli("exec", box, "--", "head", "-c", "5000000", "/dev/zero")
    assert done.out == bytes(5_000_000)


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["{}", "no-such-program"], 127, "no-such-program"),
        (["{}", "/etc/passwd"], 126, "/etc/passwd"),
        (["-w", "/nowhere", "{}", "true"], 125, "/nowhere"),
        (["no-such-sandbox", "true"], 125, "sandkeep ls --all"),
    ],
)
def test_failures_of_sandkeep_have_their_own_exit_status(
    cli: Program, box: str, args: list[str], status: int, said: str
) -> None:
    assert said in cli.fails("exec", *(arg.format(box) for arg in args), status=status)


def test_the_hint_for_a_failure_is_printed_once(cli: Program, box: str) -> None:
    assert cli.fails("exec", box, "--", "echo hello", status=127).count("No shell is involved") == 1


def test_run_fails_like_exec_and_still_leaves_nothing(cli: Program) -> None:
    before = names(cli)
    cli.fails("run", "--", "no-such-program", status=127)
    assert "sandkeep images pull no-such-image" in cli.fails(
        "run", "--pull", "never", "--image", "no-such-image", "true", status=125
    )
    assert names(cli) == before


@pytest.mark.parametrize(
    ("script", "status"), [("exit 255", 255), ("kill -TERM $$", 143), ("kill -KILL $$", 137)]
)
def test_the_exit_status_is_the_commands_own(cli: Program, box: str, script: str, status: int) -> None:
    cli("exec", box, "--", "sh", "-c", script, status=status)


def test_a_command_that_takes_too_long_is_killed(cli: Program, box: str) -> None:
    done = cli("exec", "--timeout", "300ms", box, "--", "sleep", "60", status=137)
    assert "time limit" in done.err


def test_a_command_ended_by_its_session_is_reported(cli: Program, name: str) -> None:
    for limit in longer_and_longer(2):  # in which it must have begun
        process = cli.start("run", "--name", name, "--timeout", f"{limit}s", "--", "sleep", "600")
        _, said = process.communicate(timeout=limit + ENOUGH)
        cli("rm", name)
        if process.returncode == 137:
            break
    assert process.returncode == 137, said
    assert f"sandkeep config timeout {name}" in said.decode()


@pytest.mark.parametrize("delay", [0.15, 0.25, 0.35, 0.5, 0.8])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_at_any_moment_nothing_is_left(
    cli: Program, delay: float, number: signal.Signals
) -> None:
    process = cli.start("run", "--", "sleep", "60")
    time.sleep(delay)
    process.send_signal(number)
    # Before it has set anything up, the signal does what it always does.
    _, said = process.communicate(timeout=ENOUGH)
    assert process.returncode in (128 + number, -number) or b"init_import_site" in said, said
    assert not [name for name in names(cli) if name.startswith("run-")]


def ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"


def test_an_interrupt_reaches_the_command_and_a_second_one_kills_it(cli: Program, box: str) -> None:
    deaf = "trap 'echo heard' INT; echo ready; while :; do sleep 0.05; done"
    process = cli.start("exec", box, "--", "sh", "-c", deaf)
    ready(process)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == b"heard\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(ENOUGH) == 137
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on_to_the_command(cli: Program, box: str, number: signal.Signals) -> None:
    traps = "trap 'exit 40' INT; trap 'exit 41' TERM; trap 'exit 42' HUP"
    script = f"{traps}; echo ready; while :; do sleep 0.05; done"
    process = cli.start("exec", box, "--", "sh", "-c", script)
    ready(process)
    process.send_signal(number)
    assert process.wait(ENOUGH) == {signal.SIGINT: 40, signal.SIGTERM: 41, signal.SIGHUP: 42}[number]
    process.communicate()


def test_a_reader_that_stops_reading_ends_the_command(cli: Program, box: str) -> None:
    process = cli.start("exec", box, "--", "yes")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(ENOUGH) == 141
    assert process.stderr is not None and process.stderr.read() == b""
    process.stderr.close()
    deadline = time.monotonic() + ENOUGH
    while cli("ps", box, "--json").json[0]["status"] == "running":
        assert time.monotonic() < deadline


def test_a_full_local_disk_is_reported_as_a_failure_of_sandkeep(cli: Program, box: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*command(), "exec", box, "echo", "x"],
            env=cli.env,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 125 and b"No space left" in done.stderr


def test_debug_shows_where_it_failed(cli: Program) -> None:
    for args in (
        ["exec", "--debug", "no-such-sandbox", "true"],
        ["--debug", "exec", "no-such-sandbox", "true"],
    ):
        done = cli(*args, status=1)
        assert "Traceback" in done.err and "NotFound" in done.err
