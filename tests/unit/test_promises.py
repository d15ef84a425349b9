"""What prose says about code, where nothing else would notice that it is not so."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from sandkeep.engine.lifecycle import Operation
from sandkeep.engine.limits import EXPLICIT
from sandkeep.host.doctor import groups
from sandkeep.sdk._async.transport import BOOT_SECONDS, QUIET_SECONDS
from sandkeep.shared import protocol
from sandkeep.spec import DEFAULT_CPUS, DEFAULT_MEMORY_MB, DEFAULT_TIMEOUT
from sandkeep.supervisor import limits
from tests.conftest import IS_ROOT, ROOT
from tests.sdk.tls import Authority

SOURCE = ROOT / "src/sandkeep"


def words(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


def test_every_row_of_the_gate_is_asked_for_and_only_through_sessions() -> None:
    """Which states and locks are meant is tried by ``tests/engine/test_gate.py``."""
    sources = {path.name: path.read_text() for path in (SOURCE / "engine").glob("*.py")}
    table = sources.pop("lifecycle.py")
    for operation in Operation:
        asked = [name for name, source in sources.items() if f"Operation.{operation.name}" in source]
        assert asked, f"nothing asks for {operation.name}"
    assert "ask_locked" in table and "Sessions.require" in table
    asking = [
        name for name, source in sources.items() if re.search(r"lifecycle import .*\brequire\b", source)
    ]
    assert asking == ["sessions.py"]


def test_memory_without_control_groups_is_told_alike_wherever_it_is_told() -> None:
    _, said = groups._without("memory", "subuid")
    every = "every two seconds"
    assert limits.RELAXED == 2.0
    for text in (said, words("SECURITY.md"), words("docs/doctor.md")):
        assert "memory is watched" in text and every in text and "instead of enforced, processes" not in text
    # The engine has the driver refuse what cannot be watched of the limits that a caller asked for.
    assert {"cpu", "pids"} == EXPLICIT
    assert "is refused there" in words("SECURITY.md")


def test_the_protocols_version_is_where_it_is_said_to_be() -> None:
    """Which versions are spoken to, and which not, is tried by ``tests/host/test_protocol.py``."""
    assert "``state.json``" in (protocol.__doc__ or "")
    source = (SOURCE / "supervisor/session.py").read_text()
    assert source.count('"protocol": protocol.PROTOCOL') == source.count('"oldest": protocol.OLDEST') == 2


def test_the_first_hour_quotes_what_is_said_and_its_links_lead_somewhere() -> None:
    page = (ROOT / "docs/first-hour.md").read_text()
    headings = re.findall(r"^## (`.*)$", page, re.MULTILINE)
    source = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert len(headings) == 10
    for heading in headings:
        quoted = re.findall(r"`([^`]+)`", heading)
        assert quoted and all(text in source for text in quoted), heading
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page):
        titles = re.findall(
            r"^#+ (.*)$", (ROOT / "docs" / (target or "first-hour.md")).read_text(), re.MULTILINE
        )
        assert anchor in {title.lower().replace(" ", "-").replace("`", "") for title in titles}, anchor
    assert DEFAULT_TIMEOUT.total_seconds() == 300 and DEFAULT_CPUS == 2 and DEFAULT_MEMORY_MB == 4096


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        below = str(page.relative_to(ROOT / "docs"))
        assert below == "index.md" or f"]({below})" in index, below


def test_the_readme_says_how_to_install_with_extras_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "\npip install . " in readme
    [named] = re.findall(r"^pip install '\.\[([\w,]+)\]'", readme, re.MULTILINE)
    assert set(named.split(",")) <= extras.keys()


def test_the_proxy_of_the_operators_page_does_what_clients_need(tmp_path: Path) -> None:
    block = (ROOT / "docs/operating.md").read_text().partition("```nginx\n")[2].partition("```")[0]
    assert block.count("{") == block.count("}") > 0
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    assert all(line.endswith((";", "{", "}")) for line in lines)
    said = {" ".join(line.rstrip(";").split()) for line in lines}
    assert said >= {
        "listen 443 ssl",
        "proxy_http_version 1.1",
        "proxy_set_header Upgrade $http_upgrade",
        "proxy_set_header Connection $connection_upgrade",
        "proxy_buffering off",
        "proxy_request_buffering off",
        "client_max_body_size 0",
        "proxy_read_timeout 15m",
    }
    assert BOOT_SECONDS < 15 * 60 and QUIET_SECONDS < 15 * 60
    if shutil.which("nginx") is None or not IS_ROOT:
        return
    Authority(tmp_path, "authority").server_context()
    for part in ("certificate.pem", "key.pem"):
        block = block.replace(f"/etc/ssl/sandkeep/{part}", str(tmp_path / "server.pem"))
    config = tmp_path / "nginx.conf"
    block = block.replace("listen 443", "listen 127.0.0.1:18443")
    config.write_text(f"pid {tmp_path}/pid; events {{}} http {{ access_log off; {block} }}")
    done = subprocess.run(["nginx", "-t", "-c", str(config)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_pages_say_what_an_idle_timeout_counts_from() -> None:
    for page in ("sdk.md", "api.md", "operating.md"):
        assert "idle timeout" in (ROOT / "docs" / page).read_text(), page


def test_a_session_goes_on_when_its_directory_cannot_be_looked_at(tmp_path: Path) -> None:
    """The supervisor used to die when the directory was deleted, and the session with it."""
    watch = limits.DiskWatch(str(tmp_path / "deleted"), limit=1, drives={})
    assert watch.check() is None and watch.interval == limits.RELAXED
