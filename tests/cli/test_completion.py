"""Completion in the shells themselves: what Tab makes of a line that was begun."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.program import Program, command
from tests.cli.screen import Screen
from tests.server.server_process import ServerProcess

SHELLS = {
    "bash": ("bash --norc", 'PS1="in> "', 'eval "$(sandkeep completion bash)"'),
    "zsh": ("zsh -f", 'PS1="in> "; autoload -Uz compinit; compinit -D', 'eval "$(sandkeep completion zsh)"'),
    "fish": (
        "fish --no-config",
        "function fish_prompt; echo 'in> '; end; function fish_title; end",
        "sandkeep completion fish | source",
    ),
}


@pytest.fixture
def screen(cli: Program, tmp_path: Path) -> Iterator[Screen]:
    program = tmp_path / "bin" / "sandkeep"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{cli.env['PATH']}"
    # Shells leave things in both.
    own = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    screen = Screen(tmp_path, {**cli.env, "PATH": path, **own})
    yield screen
    screen.close()


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_commands_and_names(screen: Screen, box: str, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} to press Tab in: apt-get install {shell}")
    for line in SHELLS[shell]:
        screen.press(line, "Enter")
    screen.press("echo rea''dy", "Enter")
    screen.until(lambda text: "\nready" in text, "a shell")
    for begun, whole in (
        ("sandkeep checkp", "sandkeep checkpoint "),
        (f"sandkeep connect {box[:-2]}", f"sandkeep connect {box}"),
        (f"sandkeep ssh {box[:-2]}", f"sandkeep ssh {box}"),
        (f"sandkeep run --name {box[:-2]}", f"sandkeep run --name {box}"),
        (f"sandkeep cp {box[:-2]}", f"sandkeep cp {box}:"),
    ):
        screen.press(begun, "Tab")
        screen.until(lambda text, whole=whole: whole.strip() in text, whole)  # type: ignore[misc]
        screen.press("C-u")


def completed(program: Program, *words: str) -> list[str]:
    env = {
        "_SANDKEEP_COMPLETE": "bash_complete",
        "COMP_WORDS": shlex.join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    return [found for line in program(env=env).text.splitlines() if (found := line.partition(",")[2])]


def test_names_come_from_the_server_the_line_names(
    server: ServerProcess, local: Program, box: str, tmp_path: Path
) -> None:
    nowhere = Program({"SANDKEEP_HOME": str(tmp_path)})
    there = ["--url", server.url, "--token", server.token]
    local("create", "-q", "--name", f"{box}-local")
    assert completed(nowhere, "sandkeep", "connect", box[:-2]) == []
    for where, found in ((there, box), (["--data-dir", str(server.data)], f"{box}-local")):
        assert completed(nowhere, "sandkeep", *where, "connect", box[:-2]) == [found]
        assert completed(nowhere, "sandkeep", "stop", *where, box[:-2]) == [found]
    local("rm", f"{box}-local")
    assert completed(nowhere, "sandkeep", "stop", "--url", "http://127.0.0.1:1", box[:-2]) == []
