"""On a real terminal: shells, editors, sizes, keys; and the terminal as it was, whatever happened."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.cli.program import Program
from tests.cli.screen import Screen
from tests.polling import ENOUGH

PROMPT = "sandbox:"
"""What the prompt of a shell inside has, after the user's name."""


@pytest.fixture
def screen(cli: Program, tmp_path: Path) -> Iterator[Screen]:
    screen = Screen(tmp_path, cli.env)
    yield screen
    screen.close()


def test_a_shell_knows_the_terminal_and_leaves_it_as_it_was(screen: Screen, box: str) -> None:
    before = screen.settings()
    screen.sandkeep("connect", box)
    screen.wait(PROMPT)
    screen.press("stty size; echo $TERM; tput colors", "Enter")
    text = screen.wait("256")
    assert ("30 100" in text and "xterm-256color" in text) or "tmux" in text or "screen" in text
    screen.resize(90, 25)
    screen.press(r"clear; until stty size | grep -qx '25[ ]90'; do sleep 0.1; done; stty size", "Enter")
    screen.wait("25 90")
    screen.press("exit 5", "Enter")
    screen.wait("status=5")
    screen.resize(100, 30)
    assert screen.settings() == before


def test_keys_reach_what_runs_inside(screen: Screen, box: str) -> None:
    screen.sandkeep("ssh", box)
    screen.wait(PROMPT)
    screen.press("sh -c 'echo as''leep; exec sleep 600'", "Enter")
    screen.wait("asleep")
    screen.press("C-c")
    screen.press("echo code=$?", "Enter")
    screen.wait("code=130")
    screen.press("clear; cat", "Enter")
    screen.until(lambda text: not text.strip(), "an empty screen")
    screen.press("typed", "Enter")
    screen.until(lambda text: text.count("typed") == 2, "an echo and a copy")
    screen.press("C-d")
    screen.press("stty -echo; echo si''lent", "Enter")
    # The shell, too, must be ready for a key that means something else while nobody waits for a line.
    screen.until(lambda text: PROMPT in text.rpartition("silent\n")[2], "a prompt after it")
    screen.press("C-d")
    screen.wait("status=0")


def test_vim_edits_a_file_on_the_whole_screen(screen: Screen, cli: Program, box: str) -> None:
    if shutil.which("vim") is None:
        pytest.skip("no vim in the host's /usr: apt-get install vim")
    screen.sandkeep("exec", "-it", box, "vim", "-u", "NONE", "-N", "note.txt")
    screen.until(lambda text: text.count("\n~") > 20, "the empty lines of vim")
    screen.press("ifirst", "Enter", "second", "Escape")
    screen.press("kdd:wq", "Enter")
    text = screen.wait("status=0")
    assert "~" not in text
    assert cli("exec", box, "cat", "note.txt").text == "second\n"


def test_htop_draws_follows_the_size_answers_keys_and_leaves(screen: Screen, box: str) -> None:
    if shutil.which("htop") is None:
        pytest.skip("no htop in the host's /usr: apt-get install htop")
    before = screen.settings()
    screen.sandkeep("exec", "-it", box, "htop", "--delay=2")
    text = screen.until(
        lambda text: all(word in text for word in ("Load average", "sandkeep-init", "F10Quit")),
        "the whole of htop",
    )
    assert text.splitlines().index(next(line for line in text.splitlines() if "F10Quit" in line)) == 29
    screen.resize(90, 20)
    screen.until(lambda text: "F10Quit" in (text.splitlines() or [""])[19:20][0], "the keys on line 20")
    screen.press("F5")
    screen.wait("F5List")
    screen.press("F10")
    text = screen.wait("status=0")
    assert "F10Quit" not in text
    screen.resize(100, 30)
    assert screen.settings() == before


def test_a_terminal_is_left_by_keys_and_attached_to_again(screen: Screen, cli: Program, box: str) -> None:
    before = screen.settings()
    screen.sandkeep("exec", "-it", "--detachable", "--metadata", "step=3", box, "sh", "-c", "echo on; cat")
    screen.wait("on")
    screen.press("C-p", "x", "C-p", "C-q")
    text = screen.wait("status=0")
    (found,) = cli("ps", "--json", box).json
    assert f"sandkeep attach {box} {found['id']}" in text
    assert (found["status"], found["metadata"]) == ("running", {"step": "3"})
    assert screen.settings() == before
    screen.sandkeep("attach", box)
    screen.until(lambda text: "^Px" in text, "what was typed before")
    screen.press("Enter", "typed", "Enter")
    screen.until(lambda text: text.count("typed") == 2, "an echo and a copy")
    screen.press("C-d")
    screen.wait("status=0")
    assert cli("ps", "--json", box).json[0]["status"] == "exited"
    screen.sandkeep("attach", box)
    screen.wait("no command runs on a terminal")


def test_colours_of_256_arrive_as_they_were_sent(screen: Screen, box: str) -> None:
    screen.sandkeep("exec", "-it", box, "sh", "-c", r"tput colors; printf '\033[38;5;208mam%s\033[0m\n' ber")
    text = screen.wait("status=0")
    assert "256" in text.split()
    assert "\033[38;5;208mamber" in screen.styled


def test_a_shell_before_the_command(screen: Screen, cli: Program, name: str) -> None:
    screen.sandkeep("run", "--connect", "--name", name, "--rm", "cat", "f")
    screen.wait(PROMPT)
    screen.press("echo made''-inside > f; clear; exit 3", "Enter")
    screen.wait("made-inside")
    screen.wait("status=0")
    screen.sandkeep("run", "--connect", "--silent")
    screen.wait(PROMPT)
    screen.press("exit 3", "Enter")
    screen.wait("status=3")
    cli.fails("exec", name, "true", status=125)


def test_a_sandbox_for_a_shell(screen: Screen, cli: Program, name: str) -> None:
    screen.sandkeep("sh", "--name", name)
    screen.wait(PROMPT)
    screen.press("echo kept > file; exit", "Enter")
    screen.wait("status=0")
    screen.sandkeep("sh", "--name", name, "--rm")
    screen.wait(PROMPT)
    screen.press("cat file; exit 3", "Enter")
    screen.wait("kept")
    screen.wait("status=3")
    cli.fails("exec", name, "true", status=125)


def test_a_shell_without_a_name_says_how_to_go_on(screen: Screen, cli: Program) -> None:
    screen.sandkeep("run", "-it", "--", "sh", "-c", "test -t 0 && test -t 1 && echo both")
    screen.wait("both")
    screen.sandkeep("sh")
    screen.wait(PROMPT)
    screen.press("C-d")
    text = screen.wait("status=0")
    made = text.partition("sandkeep connect ")[2].partition("'")[0]
    assert cli("rm", made).text == f"{made}\n"


def test_ctrl_c_interrupts_a_command_without_a_terminal_and_twice_kills_it(screen: Screen, box: str) -> None:
    screen.sandkeep(
        "exec", box, "--", "sh", "-c", "trap 'echo heard' INT; echo on; while :; do sleep 0.05; done"
    )
    screen.until(lambda text: "\non\n" in text, "a started command")
    screen.press("C-c")
    screen.until(lambda text: "heard\n" in text, "an answer")
    screen.press("C-c")
    screen.wait("status=137")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_puts_the_terminal_in_order(screen: Screen, box: str, number: signal.Signals) -> None:
    before = screen.settings()
    screen.sandkeep("exec", "-it", box, "sh", "-c", r"printf '\033[?1049h\033[?25lfu%s' ll; sleep 600")
    screen.wait("full")
    os.kill(screen.pid_of(box), number)
    text = screen.wait(f"status={128 + number}")
    assert "full" not in text
    assert screen.settings() == before


def test_a_session_that_ends_meanwhile_is_told(screen: Screen, cli: Program, box: str) -> None:
    before = screen.settings()
    screen.sandkeep("connect", box)
    screen.wait(PROMPT)
    cli("stop", box)
    text = screen.wait("status=")
    assert "ended while the terminal was open" in text
    assert screen.settings() == before


@pytest.mark.parametrize(("command", "status"), [("no-such-program", 127), ("/etc/passwd", 126)])
def test_programs_that_cannot_run(screen: Screen, box: str, command: str, status: int) -> None:
    screen.sandkeep("exec", "-it", box, command)
    assert command in screen.wait(f"status={status}")


def test_options_count_on_a_terminal_too(screen: Screen, box: str) -> None:
    screen.sandkeep(
        "exec", "-it", "--sudo", "-w", "/tmp", "-e", "A=b", box, "sh", "-c", "id -u; pwd; echo $A"
    )
    text = screen.wait("status=0")
    assert text.split()[text.split().index("status=0") - 3 :][:3] == ["0", "/tmp", "b"]


def test_a_time_limit_counts_on_a_terminal_too(screen: Screen, cli: Program, box: str) -> None:
    for command in (
        ["exec", "-it", "--timeout", "1s", box, "sleep", "7655"],
        ["connect", "--timeout", "1s", box],
    ):
        before = screen.settings()
        screen.sandkeep(*command)
        assert "killed after 1s" in screen.wait("status=137")
        assert screen.settings() == before
    screen.sandkeep("connect", "--timeout", "1h", box)
    screen.wait(PROMPT)
    screen.press("exit 5", "Enter")
    screen.wait("status=5")
    cli("connect", "--timeout", "1s", box, input=b"exec sleep 600\n", status=137)


def expiry(cli: Program, name: str) -> datetime:
    return datetime.fromisoformat(cli("config", "list", name, "--json").json["expiresAt"])


def test_the_timeout_is_extended_while_attached_unless_told_not_to(
    screen: Screen, cli: Program, name: str
) -> None:
    cli("create", "-q", "--name", name, "--timeout", "110s")
    first = expiry(cli, name)
    for command in (["connect", name], ["run", "--connect", "--name", name, "--", "true"]):
        screen.sandkeep(command[0], "--no-extend-timeout", *command[1:])
        screen.wait(PROMPT)
        time.sleep(1)
        assert expiry(cli, name) == first
        screen.press("C-d")
        screen.wait("status=0")
        screen.press("clear", "Enter")
    screen.sandkeep("connect", name)
    screen.wait(PROMPT)
    deadline = time.monotonic() + ENOUGH
    while (expiry(cli, name) - datetime.now(UTC)).total_seconds() < 240:
        assert time.monotonic() < deadline
    screen.press("C-d")
    screen.wait("status=0")
    cli("rm", name)


BAR = """
import itertools, os, sys, time
from sandkeep.cli.progress import busy, measured
with busy("Waiting", quiet=False):
    while not os.path.exists(sys.argv[1] + "/waited"):
        time.sleep(0.1)
with measured("Sending it", quiet=False) as bar:
    for turn in itertools.count():
        bar.update(turn % 30 << 20, 30 << 20, what="a file")
        if os.path.exists(sys.argv[1] + "/sent"):
            break
        time.sleep(0.1)
print("over")
"""


def test_progress_moves_on_a_terminal_and_leaves_no_trace(screen: Screen, tmp_path: Path) -> None:
    (tmp_path / "bar.py").write_text(BAR)
    screen.press(f"{sys.executable} {tmp_path}/bar.py {tmp_path}", "Enter")
    screen.wait("Waiting")
    (tmp_path / "waited").touch()
    text = screen.until(lambda text: "a file" in text and "MiB of 30.0 MiB" in text, "a bar")
    assert "━" in text and "Waiting" not in text
    (tmp_path / "sent").touch()
    text = screen.until(lambda text: "\nover\n" in text, "the end")
    assert "Sending" not in text
    silent = subprocess.run(
        [sys.executable, str(tmp_path / "bar.py"), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert (silent.stdout, silent.stderr) == ("over\n", "")


def test_tables_fit_and_colours_show_on_a_terminal_only_if_wanted(screen: Screen, box: str) -> None:
    screen.resize(60, 30)
    screen.sandkeep("ls", "--all", "--name-prefix", box)
    text = screen.wait("status=0")
    assert "…" in text
    assert all(len(line) <= 60 for line in text.splitlines() if "sandkeep" not in line)
