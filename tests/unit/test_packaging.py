"""What is published: the wheel's content and metadata, built as an installer would build it."""

from __future__ import annotations

import email
import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import sandkeep
from tests.conftest import ROOT

SOURCE = ROOT / "src/sandkeep"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("the build backend hatchling is not installed here")
    where = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(where)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = where.glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def source_files() -> set[str]:
    """What git has, or would have, of the package, relative to ``src``."""
    argv = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run([*argv, "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git cannot list the sources: {error}")
    names = {Path(name) for name in listed.splitlines()}
    return {str(name.relative_to("src")) for name in names if (ROOT / name).exists()}


def test_the_wheel_holds_the_sources_and_the_licence_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = set(wheel.namelist())
    about = {name for name in packed if ".dist-info/" in name}
    assert packed - about == source_files()
    assert {"sandkeep/py.typed", "sandkeep/host/images/sudo.sh"} <= packed
    ends = {name.partition(".dist-info/")[2] for name in about}
    assert ends == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    [licence] = [name for name in about if name.endswith("LICENSE")]
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_has_the_version_and_the_licence_of_the_package(metadata: Message) -> None:
    assert metadata["Version"] == sandkeep.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License"] is None
    assert metadata.get_all("License-File") == ["LICENSE"]


def test_what_is_published_does_not_ask_for_what_only_contributors_need(metadata: Message) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert set(groups) == {"dev", "bench"}
    assert set(metadata.get_all("Provides-Extra") or ()) == {"net", "zstd"}
    asked = " ".join(metadata.get_all("Requires-Dist") or ())
    assert "pytest" not in asked and "matplotlib" not in asked


def test_elsewhere_than_on_linux_only_the_client_is_installed(metadata: Message) -> None:
    """Requirements that only ``server`` and ``net`` import are for Linux, all others for every system."""
    asked = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
    here_only = {
        line.partition(">")[0].partition("<")[0] for line in asked if "sys_platform == 'linux'" in line
    }
    assert here_only == {"h11", "uvicorn", "uvloop"}
    client = [path for part in ("sdk", "sync", "cli", "wire") for path in (SOURCE / part).rglob("*.py")]
    for path in [*client, *SOURCE.glob("*.py")]:
        for name in here_only:
            assert f"import {name}" not in path.read_text(), path
