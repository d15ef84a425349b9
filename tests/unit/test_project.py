"""The project keeps its own rules: format, lint, types, import directions, documents that match the code."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import sandkeep
from sandkeep.cli.main import COMMANDS
from sandkeep.engine.settings import NetworkSettings, Settings
from sandkeep.host import doctor

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "sandkeep"
CHECKED = ["src", "tests", "dev", *(name for name in ("benchmarks", "examples") if (ROOT / name).is_dir())]


def tool(*argv: str) -> None:
    done = subprocess.run([sys.executable, "-m", *argv], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{' '.join(argv)}\n{done.stdout}{done.stderr}", pytrace=False)


# --- format, lint, types -------------------------------------------------------------------------------


def test_code_is_formatted() -> None:
    tool("ruff", "format", "--check", *CHECKED)


def test_code_is_lint_free() -> None:
    tool("ruff", "check", *CHECKED)


def test_types_hold() -> None:
    tool("mypy", "--no-error-summary")


# --- imports point one way -----------------------------------------------------------------------------

# What each part may import from the package, besides itself and the modules at the root.
MAY_IMPORT = {
    "linux": set[str](),
    "supervisor": {"linux"},
    "host": {"supervisor", "linux"},
    "wire": set[str](),
    "store": set[str](),
    "net": {"linux", "wire", "supervisor"},
    "engine": {"host", "store", "net", "wire", "linux", "supervisor"},
    "server": {"engine", "store", "net", "wire", "supervisor"},
    "sdk": {"wire"},
    "sync": {"sdk", "wire"},
    "cli": {"sync", "server", "store", "host", "linux"},
}
# How a client starts a server: of the server's modules the one that imports none of the others.
EXCEPTIONS = {("sdk", "sandkeep.server.embedded"), ("sync", "sandkeep.server.embedded")}
# Slow to import or meant for other jobs; a fork of the zygote pays for every module it holds.
TOO_HEAVY = {
    "asyncio",
    "dataclasses",
    "logging",
    "pathlib",
    "re",
    "shutil",
    "subprocess",
    "tarfile",
    "tempfile",
}


def modules(part: str) -> Iterator[Path]:
    yield from sorted((PACKAGE / part).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Every module a file names in an import, wherever in the file, except for type checkers only."""
    tree = ast.parse(path.read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            if node.module == "sandkeep":
                yield from (f"sandkeep.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part: str) -> None:
    allowed = MAY_IMPORT[part] | {part, "__version__", *(path.stem for path in PACKAGE.glob("*.py"))}
    for path in modules(part):
        for name in imported(path):
            if name.startswith("sandkeep.") and (part, name) not in EXCEPTIONS:
                assert name.split(".")[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("part", ["linux", "supervisor"])
def test_what_runs_in_a_session_uses_the_standard_library_only(part: str) -> None:
    for path in modules(part):
        for name in imported(path):
            top = name.split(".")[0]
            assert top == "sandkeep" or top in sys.stdlib_module_names, f"{path.relative_to(ROOT)}: {name}"


@pytest.mark.parametrize("part", ["linux", "supervisor"])
def test_what_the_zygote_holds_imports_little(part: str) -> None:
    for path in modules(part):
        heavy = TOO_HEAVY & {name.split(".")[0] for name in imported(path)}
        assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)}"


def loaded_by(code: str) -> set[str]:
    script = f"import sys; before = set(sys.modules); {code}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_command_line_starts_light() -> None:
    loaded = loaded_by("from sandkeep.cli.main import main; main(['version'])")
    assert not loaded & {"argparse", "asyncio", "subprocess", "ctypes", "sandkeep.host"}


def test_the_package_root_imports_nothing() -> None:
    assert {name for name in loaded_by("import sandkeep") if "sandkeep" in name} == {"sandkeep"}


# --- the test run itself -------------------------------------------------------------------------------

LITTER = """
import os, subprocess, sys, tempfile
from sandkeep.linux import cgroup, syscalls

def test_litter(tmp_path):
    subprocess.Popen(["setsid", "sleep", "120"]).returncode = 0
    syscalls.mount("tmpfs", str(tmp_path), "tmpfs")
    cgroup.detect().create("litter")
    os.mkdir(os.path.join(tempfile.gettempdir(), "forgotten"))
"""


@pytest.mark.root
def test_a_run_that_leaves_things_behind_fails_and_names_them(tmp_path: Path) -> None:
    (tmp_path / "test_litter.py").write_text(LITTER)
    argv = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c"]
    argv += [str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", str(tmp_path / "test_litter.py")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    report = done.stdout[done.stdout.index("the run left things behind") :]
    for kind, what in (
        ("processes", "sleep"),
        ("control groups", "/litter"),
        ("mounts", "test_litter0 tmpfs"),
        ("temporary files", "forgotten"),
    ):
        assert any(kind in line and what in line for line in report.splitlines()), report


# --- documents -----------------------------------------------------------------------------------------


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == sandkeep.__version__


def test_readme_has_its_two_commands_and_ci_runs_the_second() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "\n./dev sandkeep run -- python3 -c 'print(\"hello from a sandbox\")'\n" in readme
    assert "\n./dev test\n" in readme
    assert "./dev test" in (ROOT / ".ci/run").read_text()


def test_the_ten_lines_of_the_readme_work(tmp_path: Path) -> None:
    report = doctor.probe(str(tmp_path))
    if not report.can_run:
        lacking = [found.name for found in report.findings if found.required and found.status == "missing"]
        pytest.skip(f"sessions cannot run here: no {', '.join(lacking)}")
    block = (ROOT / "README.md").read_text().partition("## Ten lines")[2].split("```")[1]
    script = block.removeprefix("python\n")
    assert len([line for line in script.splitlines() if line]) <= 10
    environment = {**os.environ, "SANDKEEP_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    server = json.loads((tmp_path / "home" / "server.json").read_text())
    os.kill(server["pid"], signal.SIGTERM)  # it would stay a while, in case somebody comes back
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "42\n['add.py']\n"


def test_changelog_has_a_place_for_what_comes_next() -> None:
    assert "\n## Unreleased\n" in (ROOT / "CHANGELOG.md").read_text()


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_doctor_page_names_every_line_doctor_prints(tmp_path: Path) -> None:
    page = (ROOT / "docs/doctor.md").read_text()
    for found in doctor.probe(str(tmp_path)).findings:
        name = found.name.rpartition(": ")[2]
        assert f"`{found.name}`" in page or f"`{name}`" in page, found.name


def test_the_page_for_operators_names_every_setting_and_every_kind_of_event() -> None:
    page = (ROOT / "docs/operating.md").read_text()
    for field in (*dataclasses.fields(Settings), *dataclasses.fields(NetworkSettings)):
        assert f"`{field.name}`" in page, field.name
    source = "".join(
        path.read_text() for part in ("engine", "server") for path in (PACKAGE / part).rglob("*.py")
    )
    kinds = set(re.findall(r'(?:event|record|_record)\(\s*(?:store, )?"([a-z]+\.[a-z-]+)"', source))
    assert len(kinds) > 15
    for kind in kinds:
        assert f"`{kind}`" in page, kind


def test_every_command_has_a_summary() -> None:
    for name, command in COMMANDS.items():
        assert command.summary and not command.summary.endswith("."), name
