"""Where sessions get their ids: from real root, from a range of subordinate ids, or the user's single id."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from typing import Final, Literal

from sandkeep.errors import IsolationUnavailable

Mode = Literal["root", "subuid", "single"]

SUBORDINATE_FILES: Final = ("/etc/subuid", "/etc/subgid")

_SUBORDINATE: Final = 65_535


def choose_mode() -> Mode:
    """Return root for uid 0, else subuid if this user has a subordinate range, else single."""
    if os.geteuid() == 0:
        return "root"
    if shutil.which("newuidmap") and shutil.which("newgidmap") and subordinate_ids() is not None:
        return "subuid"
    return "single"


def subordinate_ids() -> tuple[int, int] | None:
    """Return the first subordinate uid and gid of this user, when both ranges are large enough."""
    uids, gids = (range_in(path) for path in SUBORDINATE_FILES)
    return None if uids is None or gids is None else (uids.start, gids.start)


def own_name() -> str:
    """Return the user's name, which those files may use in place of its number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def range_in(path: str) -> range | None:
    """Return the first range in ``path`` for this user that is large enough."""
    names = {str(os.getuid()), own_name()}
    try:
        with open(path, encoding="utf-8") as handle:
            rows = [line.strip().split(":") for line in handle]
    except OSError:
        return None
    for row in rows:
        if len(row) == 3 and row[0] in names and row[2].isdigit() and int(row[2]) >= _SUBORDINATE:
            return range(int(row[1]), int(row[1]) + int(row[2]))
    return None


def map_ids(pid: int) -> None:
    """Map this user's id and subordinate ranges into the user namespace of a process."""
    ranges = subordinate_ids()
    if ranges is None:
        raise IsolationUnavailable(
            "no subordinate id range for this user",
            part="id-range",
            why="/etc/subuid and /etc/subgid name none",
            hint="add one with usermod --add-subuids, or use the single-id mode",
        )
    own = (os.getuid(), os.getgid())
    for program, inside, first in zip(("newuidmap", "newgidmap"), own, ranges, strict=True):
        command = [program, str(pid), "0", str(inside), "1", "1", str(first), str(_SUBORDINATE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise IsolationUnavailable(
                f"{program} failed: {done.stderr.strip()}",
                part="id-range",
                why=done.stderr.strip(),
                hint="run 'sandkeep doctor'",
            )
