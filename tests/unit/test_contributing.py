"""What CONTRIBUTING.md, ``dev`` and the workflow promise to contributors."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.dev_script import dev_script

GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
WORKFLOW = (ROOT / ".github/workflows/test.yml").read_text()


# --- dev -----------------------------------------------------------------------------------------------


def test_generated_files_are_what_the_generators_write() -> None:
    dev = dev_script()
    dev.PYTHON = sys.executable
    assert dev.generate(check=True) == 0


@pytest.mark.parametrize(
    ("stale", "generator", "text"),
    [
        ("docs/cli.md", "scripts/cli_docs.py", "sandkeep run"),
        ("docs/design/index.md", "scripts/imports.py", "sync       -> sdk"),
        ("docs/reference.md", "scripts/reference.py", "Sandbox.stop"),
        ("src/sandkeep/sync/client.py", "scripts/unasync.py", "def close"),
    ],
)
def test_a_stale_file_is_found_and_written_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], stale: str, generator: str, text: str
) -> None:
    # Every generator writes into the clone that it is in, so a copy of that is enough.
    for name in ("scripts", "docs", "examples", "src/sandkeep", "tests/sdk"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    dev = dev_script()
    dev.ROOT, dev.PYTHON, dev.GENERATORS = str(tmp_path), sys.executable, (generator,)
    path = tmp_path / stale
    fresh = path.read_text()
    assert text in fresh
    path.write_text(fresh.replace(text, "by hand"))
    assert dev.generate(check=True) == 1
    assert f"{generator} failed: run ./dev generate" in capfd.readouterr().err
    assert path.read_text() != fresh, "--check changes nothing"
    assert dev.generate(check=False) == 0 and path.read_text() == fresh


def test_fix_mends_and_formats_and_says_what_it_cannot_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    dev = dev_script()
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    dev.ROOT, dev.PYTHON, dev.GENERATORS, dev.CHECKED = str(tmp_path), sys.executable, (), ("a.py",)
    source = tmp_path / "a.py"
    source.write_text("import os\nx = {  'a':1 }\n")
    assert dev.fix() == 0 and source.read_text() == 'x = {"a": 1}\n'
    source.write_text("print(  unknown )\n")
    assert dev.fix() == 1 and source.read_text() == "print(unknown)\n"
    assert "unknown" in capfd.readouterr().out


def test_dev_knows_every_generator_and_every_folder_with_python() -> None:
    dev = dev_script()
    writing = {f"scripts/{path.name}" for path in ROOT.glob("scripts/*.py") if "--check" in path.read_text()}
    assert set(dev.GENERATORS) == writing
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout
    assert {Path(name).parts[0] for name in listed.splitlines()} <= set(dev.CHECKED)


@pytest.mark.parametrize("arguments", [["fix", "src"], ["generate", "--chek"]])
def test_dev_refuses_arguments_it_does_not_know(arguments: list[str]) -> None:
    done = subprocess.run([ROOT / "dev", *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and f"{arguments[0]} does not take {arguments[1]}" in done.stderr


def test_the_interpreter_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    dev = dev_script()
    monkeypatch.setenv("DEV_PYTHON", sys.executable)
    assert dev.choose_interpreter() == sys.executable
    monkeypatch.setenv("DEV_PYTHON", "/bin/true-python")
    with pytest.raises(dev.Failed, match="DEV_PYTHON"):
        dev.choose_interpreter()


# --- the guide -----------------------------------------------------------------------------------------


def test_the_guide_names_every_command_generator_marker_and_folder() -> None:
    dev = dev_script()
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    for command in ("fix", "generate", "test", "sandkeep", "python", "bench"):
        assert (
            command in dev.COMMANDS
            and f"./dev {command}" in GUIDE
            and f"./dev {command}" in (dev.__doc__ or "")
        )
    for name in (*dev.GENERATORS, *(marker.partition(":")[0] for marker in markers)):
        assert f"`{name}`" in GUIDE, name
    for folder in re.findall(r"^\| `([a-z/]+)` \|", GUIDE.partition("## Change")[0], re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder
    assert "](CONTRIBUTING.md)" in (ROOT / "README.md").read_text()


def test_the_commit_template_is_the_form_of_the_guide() -> None:
    template = (ROOT / ".gitmessage").read_text()
    assert "commit.template .gitmessage" in GUIDE
    for part in (
        "area: do what, in the imperative, at most 72 characters",
        "Observed:",
        "Why:",
        "Why this way:",
    ):
        assert part in template and part in GUIDE
    # Git leaves out lines with a hash, so an unchanged template is an empty message, which it refuses.
    assert all(line.startswith("#") for line in template.splitlines() if line)


# --- the workflow --------------------------------------------------------------------------------------


def test_the_workflow_runs_the_readmes_command_on_every_python_as_both_kinds_of_user() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    claimed = [found[1] for line in classifiers if (found := re.search(r":: (3\.\d+)$", line))]
    [versions] = re.findall(r"^ +python: \[(.*)\]$", WORKFLOW, re.MULTILINE)
    assert re.findall(r'"([\d.]+)"', versions) == claimed == ["3.11", "3.12", "3.13", "3.14"]
    [users] = re.findall(r"^ +user: \[(.*)\]$", WORKFLOW, re.MULTILINE)
    assert users.split(", ") == ["root", "ordinary"]
    runs = dict(re.findall(r"if: matrix\.user == '(\w+)'\n +run: (.*)$", WORKFLOW, re.MULTILINE))
    assert set(runs) == {"root", "ordinary"}
    assert "\n./dev test\n" in (ROOT / "README.md").read_text()
    assert all(command.endswith(" ./dev test") for command in runs.values())
    assert runs["root"].startswith("sudo ") and "sudo" not in runs["ordinary"]


def test_the_workflow_installs_what_dev_would_install_as_root() -> None:
    [listed] = re.findall(r"install -y --no-install-recommends \\\n((?:.*\\\n)*.*)\n", WORKFLOW)
    assert set(listed.replace("\\", " ").split()) == set(dev_script().PACKAGES.values())


def test_the_package_says_which_pythons_it_runs_on_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11" and dev_script().NEEDED == (3, 11)
