"""The ids of sessions: from real root, from a range of subordinate ids, or the user's single id."""

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
    """Real root, else a subordinate id range if this user has one, else the single id everyone has."""
    if os.geteuid() == 0:
        return "root"
    if shutil.which("newuidmap") and shutil.which("newgidmap") and subordinate_ids() is not None:
        return "subuid"
    return "single"


def subordinate_ids() -> tuple[int, int] | None:
    """The first subordinate uid and gid of this user, when both ranges are large enough."""
    uids, gids = (range_in(path) for path in SUBORDINATE_FILES)
    return None if uids is None or gids is None else (uids.start, gids.start)


def own_name() -> str:
    """What those files may call this user, besides its number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def range_in(path: str) -> range | None:
    """The first range there for this user that is large enough."""
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
    """Give a process that has a user namespace of its own this user's id and subordinate ranges in it."""
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
