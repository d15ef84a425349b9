"""One walk over the host's ``/usr``: its directories, and warnings for operators before they share it."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from sandkeep.host.images.hostimage.graft import CLOSED, USR

_KEY_ENDINGS = (".pem", ".key", ".p12", ".pfx", ".jks", ".keystore")
_MOST_WARNINGS = 200


@dataclass
class Survey:
    directories: list[tuple[str, int]] = field(default_factory=list)
    """Relative name and mode of every directory that can be entered, parents first."""
    warnings: list[str] = field(default_factory=list)


def survey(masks: frozenset[str]) -> Survey:
    result = Survey()
    hidden = masks.union(CLOSED)
    device = os.stat(USR).st_dev
    pending = [""]
    while pending:
        name = pending.pop()
        try:
            entries = os.scandir(f"{USR}/{name}")
        except OSError:
            continue
        with entries:
            for entry in entries:
                inner = f"{name}/{entry.name}" if name else entry.name
                if inner in hidden:
                    continue
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    if info.st_dev != device:
                        continue  # another filesystem is mounted there; a clone of /usr does not include it
                    _judge(result, inner, info)
                    if info.st_mode & stat.S_IXOTH:
                        result.directories.append((inner, stat.S_IMODE(info.st_mode)))
                    pending.append(inner)
                elif stat.S_ISREG(info.st_mode):
                    _judge(result, inner, info)
                    if entry.name.endswith(_KEY_ENDINGS) or entry.name.startswith("id_"):
                        _look_for_key(result, inner)
    result.warnings.sort()
    return result


def _judge(result: Survey, name: str, info: os.stat_result) -> None:
    if len(result.warnings) >= _MOST_WARNINGS:
        return
    path = f"{USR}/{name}"
    if not info.st_mode & stat.S_IROTH and not info.st_mode & (stat.S_ISUID | stat.S_ISGID):
        result.warnings.append(f"{path}: not readable by everyone on the host, but by root inside")
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        result.warnings.append(f"{path}: writable by everyone on the host")
    if info.st_uid >= 1000 and info.st_uid != 65534:
        result.warnings.append(f"{path}: belongs to uid {info.st_uid}, not to the system")


def _look_for_key(result: Survey, name: str) -> None:
    if len(result.warnings) >= _MOST_WARNINGS:
        return
    path = f"{USR}/{name}"
    try:
        with open(path, "rb") as source:
            if b"PRIVATE KEY-----" in source.read(1 << 16):
                result.warnings.append(f"{path}: holds a private key")
    except OSError:
        return
