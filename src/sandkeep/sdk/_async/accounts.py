"""Accounts and groups inside a sandbox, made with the sandbox's own ``useradd`` and ``groupadd``."""

from __future__ import annotations

import re
from typing import Final

from sandkeep.checks import expect, refuse
from sandkeep.errors import NotFound, PathExists
from sandkeep.sdk._async.running import Runner, SandboxUser
from sandkeep.sdk.values import CompletedProcess, SandboxGroup

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_EXISTS, _NO_GROUP, _NO_USER, _NO_MEMBER = 9, 61, 62, 63
"""Exit statuses: the first is that of ``useradd`` and ``groupadd``, the others are ours."""

_CREATE_GROUP: Final = """
groupadd -- "$1" || exit
mkdir -p -- "$2" && chown -- "${SUDO_USER:-root}:$1" "$2" && chmod 2770 -- "$2" && exit
groupdel -- "$1"
exit 1
"""
_LOOK: Final = f"""
getent group "$1" >/dev/null || exit {_NO_GROUP}
getent passwd "$2" >/dev/null || exit {_NO_USER}
"""
_ADD: Final = f"""{_LOOK}
exec usermod --append --groups "$1" -- "$2"
"""
_REMOVE: Final = f"""{_LOOK}
id -nG -- "$2" | tr ' ' '\\n' | grep -qxF -e "$1" || exit {_NO_MEMBER}
exec gpasswd --delete "$2" "$1"
"""


async def create_user(box: Runner, name: str) -> None:
    await _see_whether_there_are_any(box)
    made = await box.run_process(
        "useradd",
        ["--create-home", "--user-group", "--shell", "/bin/bash", "--", name],
        sudo=True,
        capture_output=True,
    )
    if made.returncode == _EXISTS:
        raise PathExists(f"an account named {name} exists already", path=name, operation="useradd")
    made.check_returncode()


async def create_group(box: Runner, name: str) -> SandboxGroup:
    _check_group(name)
    await _see_whether_there_are_any(box)
    group = SandboxGroup(name, f"/shared/{name}")
    made = await _script(box, _CREATE_GROUP, name, group.directory)
    if made.returncode == _EXISTS:
        raise PathExists(f"a group named {name} exists already", path=name, operation="groupadd")
    made.check_returncode()
    return group


async def add_to_group(box: Runner, user: SandboxUser | str, group: SandboxGroup | str) -> None:
    await _change(box, _ADD, user, group)


async def remove_from_group(box: Runner, user: SandboxUser | str, group: SandboxGroup | str) -> None:
    await _change(box, _REMOVE, user, group)


async def _change(box: Runner, script: str, user: SandboxUser | str, group: SandboxGroup | str) -> None:
    expect("user", user, (SandboxUser, str), "a SandboxUser or the name of an account")
    expect("group", group, (SandboxGroup, str), "a SandboxGroup or the name of a group")
    who = user if isinstance(user, str) else user.name
    where = group if isinstance(group, str) else group.name
    _check_group(where, "group")
    if not who:
        refuse("user", "must not be empty")
    await _see_whether_there_are_any(box)
    changed = await _script(box, script, where, who)
    if changed.returncode == _NO_GROUP:
        raise NotFound(f"no group named {where} in the sandbox", kind="group", name=where)
    if changed.returncode == _NO_USER:
        raise NotFound(f"no account named {who} in the sandbox", kind="account", name=who)
    if changed.returncode == _NO_MEMBER:
        raise NotFound(f"{who} is not in group {where}", kind="member", name=who)
    changed.check_returncode()


async def _see_whether_there_are_any(box: Runner) -> None:
    """Refuse where every process runs as root: ``useradd`` and ``groupadd`` would only seem to work there."""
    await SandboxUser(box._transport, box._recovery, "1").fs.exists("/")


async def _script(box: Runner, script: str, *words: str) -> CompletedProcess:
    return await box.run_process("sh", ["-c", script, "sh", *words], sudo=True, capture_output=True)


def _check_group(name: str, field: str = "name") -> None:
    """Check a name that is also used as a directory name and in a list."""
    expect(field, name, str, "text")
    if not _NAME.fullmatch(name):
        refuse(
            field,
            "must begin with a letter or '_' and have at most 32 letters, digits, '_', '.' and '-'",
        )
