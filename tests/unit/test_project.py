"""The project keeps its own rules: format, lint, types, import directions, documents that match the code."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from datetime import timedelta
from pathlib import Path

import pytest

from sandkeep.cli.table import COMMANDS
from sandkeep.engine.settings import NetworkSettings, Settings
from sandkeep.host import doctor
from sandkeep.paths import data_directory
from sandkeep.spec import DEFAULT_TIMEOUT
from scripts import imports
from tests.dev_script import dev_script

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "sandkeep"
CHECKED = ["src", "tests", "scripts", "benchmarks", "examples", "dev"]


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
    "shared": {"linux"},
    "supervisor": {"shared", "linux"},
    "host": {"supervisor", "shared", "linux"},
    "wire": set[str](),
    "store": {"shared"},
    "net": {"linux", "shared"},
    "engine": {"host", "store", "net", "linux", "shared"},
    "server": {"engine", "store", "wire", "shared"},
    "sdk": {"wire", "shared"},
    "sync": {"sdk", "wire"},
    "cli": {"sync", "server", "host", "linux"},
}
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


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part: str) -> None:
    allowed = MAY_IMPORT[part] | {part, None, *imports.root_modules()}
    for path in imports.modules(part):
        for name, line in imports.imports(path):
            assert imports.used_part(name) in allowed, f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_every_import_that_the_table_allows_is_used() -> None:
    """An arrow that nothing uses any more would let the next one in unseen."""
    edges = imports.graph()
    unused = {part: allowed - set(edges[part]) for part, allowed in MAY_IMPORT.items()}
    assert not {part: names for part, names in unused.items() if names}


def test_every_package_has_its_row_and_none_imports_in_a_circle() -> None:
    assert imports.packages() == sorted(MAY_IMPORT)
    drawn = imports.drawing()  # raises and shows a circle, should there be one
    assert all(f"\n{part} " in f"\n{drawn}" for part in MAY_IMPORT)
    with pytest.raises(ValueError, match=r"^(engine -> wire -> engine|wire -> engine -> wire)$"):
        imports.ordered({"engine": {"wire": 1}, "wire": {"engine": 1}})


def test_a_module_beside_the_packages_imports_none_of_them() -> None:
    """The packages may all import it, so the table could not see a way back up."""
    for module in set(imports.root_modules()) - {"__main__"}:
        [path] = imports.modules(module)
        for name, line in imports.imports(path):
            assert imports.used_part(name) not in MAY_IMPORT, f"{module}.py:{line} imports {name}"


@pytest.mark.parametrize("part", ["linux", "shared", "supervisor"])
def test_what_runs_in_a_session_uses_the_standard_library_only(part: str) -> None:
    for path in imports.modules(part):
        for name, _ in imports.imports(path):
            top = name.split(".")[0]
            assert top == "sandkeep" or top in sys.stdlib_module_names, f"{path.relative_to(ROOT)}: {name}"


@pytest.mark.parametrize("part", ["linux", "shared", "supervisor"])
def test_what_the_zygote_holds_imports_little(part: str) -> None:
    for path in imports.modules(part):
        heavy = TOO_HEAVY & {name.split(".")[0] for name, _ in imports.imports(path)}
        assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)}"


def loaded_by(code: str) -> set[str]:
    script = f"import sys; before = set(sys.modules); {code}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_command_line_starts_light() -> None:
    loaded = loaded_by("from sandkeep.cli.main import main; main(['version'])")
    assert not loaded & {"argparse", "asyncio", "subprocess", "ctypes", "sandkeep.host"}


SLOW_TO_IMPORT = {"hashlib", "httpcore2", "json", "logging", "secrets", "ssl", "subprocess", "urllib"}


@pytest.mark.parametrize("sdk", ["sandkeep", "sandkeep.sync"])
def test_the_sdk_imports_only_what_every_program_needs(sdk: str) -> None:
    loaded = loaded_by(f"import {sdk} as sdk; sdk.Client")
    assert not loaded & {*SLOW_TO_IMPORT, "asyncio", "http", "sandkeep.embedded", "sandkeep.wire.bodies"}
    assert len(loaded) < 185


def test_a_run_from_the_command_line_imports_only_what_it_needs() -> None:
    code = "from sandkeep.cli.tree import load; load('run'); from sandkeep import sync; sync.Client"
    assert not loaded_by(code) & SLOW_TO_IMPORT


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


@pytest.mark.slow
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


def test_readme_has_its_two_commands_and_ci_runs_the_second() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "\n./dev sandkeep run -- python3 -c 'print(\"hello from a sandbox\")'\n" in readme
    assert "\n./dev test\n" in readme
    assert "./dev test" in (ROOT / ".ci/run").read_text()


def test_dev_installs_what_the_examples_need_or_says_once_that_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    dev = dev_script()
    asked: list[list[str]] = []
    broken = True

    def run(argv: list[str], cwd: str | None = None) -> None:
        asked.append(argv)
        if broken and extras["net"][0] in argv:
            raise dev.Failed("no such wheel")

    monkeypatch.setattr(dev, "VENV", str(tmp_path))
    monkeypatch.setattr(dev, "run", run)
    monkeypatch.setattr(dev, "make_venv", lambda: None)
    monkeypatch.setattr(dev, "pip_command", lambda scratch: ["pip"])
    dev.set_up_for_use()
    assert "no such wheel" in capsys.readouterr().err and len(asked) == 2
    dev.set_up_for_use()
    assert not capsys.readouterr().err and len(asked) == 2
    broken = False
    (tmp_path / "lacking.json").unlink()
    dev.set_up_for_use()
    assert {*extras["net"], *extras["zstd"]} <= set(asked[2])


def test_the_readme_says_what_stays_and_what_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    for name in ("SANDKEEP_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    place = data_directory().replace(os.path.expanduser("~"), "~", 1)
    assert f"`{place}`, or where `SANDKEEP_HOME` says" in readme
    assert timedelta(minutes=5) == DEFAULT_TIMEOUT and "A session ends after five minutes" in readme
    assert {"status", "uninstall"} <= COMMANDS.keys()
    assert "`sandkeep status`" in readme and "`sandkeep uninstall`" in readme


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


def test_every_test_that_a_document_names_exists() -> None:
    source = "".join(
        path.read_text() for path in (ROOT / "tests").rglob("*.*") if path.suffix in (".py", ".ts")
    )
    known = set(re.findall(r"\bdef (test_\w+)", source))
    for path in documents():
        for name in re.findall(r"`(test_\w+)`", path.read_text()):
            assert name in known, f"{path.name} names {name}"


def test_every_row_on_durability_names_its_tests() -> None:
    rows = [line for line in (ROOT / "docs/durability.md").read_text().splitlines() if line.startswith("| ")]
    said = [row for row in rows if not row.endswith("| shown by |")]
    assert len(said) > 40
    for row in said:
        assert re.search(r"`(test_\w+|tests/\S+\.py)` \|$", row), row
        for file in re.findall(r"`(tests/\S+)`", row):
            assert (ROOT / file).is_file(), row


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
