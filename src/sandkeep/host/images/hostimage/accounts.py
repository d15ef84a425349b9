"""Users and groups as text files, and the rows every sandbox must have.

``AccountFiles`` reads and writes ``passwd``, ``group``, ``shadow`` and ``gshadow`` as lists of fields and
adds the default user. System rows are kept because files in ``/usr`` belong to those ids; login users of the
host are left out, because the sandbox must not learn their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sandkeep.host.rootfs import HOME

USER = "sandbox"
USER_ID = 1000
SUDO_GROUP = "sudo"
FIRST_LOGIN_ID = 1000
NOBODY_ID = 65534

AccountFields = list[str]

_MINIMAL_PASSWD = (
    "root:x:0:0:root:/root:/bin/bash\n"
    "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
)
_MINIMAL_GROUP = "root:x:0:\ndaemon:x:1:\ntty:x:5:\nshadow:x:42:\nnogroup:x:65534:\n"


def parse(text: str, fields: int) -> list[AccountFields]:
    """Return the rows with the right number of fields; comments, NIS markers and torn lines are dropped."""
    rows = (line.split(":") for line in text.splitlines() if line and line[0] not in "#+-")
    return [row for row in rows if len(row) == fields]


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else -1


@dataclass
class AccountFiles:
    passwd: list[AccountFields]
    group: list[AccountFields]
    shadow: dict[str, AccountFields] = field(default_factory=dict)
    gshadow: dict[str, AccountFields] = field(default_factory=dict)

    @classmethod
    def of_system(cls, passwd: str, group: str) -> AccountFiles:
        """Return the system rows of a machine's files: no login users, no passwords, no group members."""
        users = [
            [name, "x", uid, gid, gecos, home, shell]
            for name, _, uid, gid, gecos, home, shell in parse(passwd, 7)
            if 0 <= _number(uid) < FIRST_LOGIN_ID or _number(uid) == NOBODY_ID
        ]
        groups = [
            [name, "x", gid, ""]
            for name, _, gid, _ in parse(group, 4)
            if 0 <= _number(gid) < FIRST_LOGIN_ID or _number(gid) == NOBODY_ID
        ]
        names = {row[0] for row in users}
        users += [row for row in parse(_MINIMAL_PASSWD, 7) if row[0] not in names]
        numbers = {row[2] for row in groups}
        groups += [row for row in parse(_MINIMAL_GROUP, 4) if row[2] not in numbers]
        users.sort(key=lambda row: _number(row[2]) != 0)  # root first: a lookup of id 0 takes the first match
        for row in users:
            if row[0] == "root":
                row[5] = "/root"
        return cls(users, groups)

    def user(self, name: str) -> AccountFields | None:
        return next((row for row in self.passwd if row[0] == name), None)

    def user_with_id(self, uid: int) -> AccountFields | None:
        return next((row for row in self.passwd if _number(row[2]) == uid), None)

    def gid_of(self, group: str) -> int | None:
        return next((_number(row[2]) for row in self.group if row[0] == group), None)

    def add_group(self, name: str, gid: int) -> int:
        """Return the gid of ``name``; if missing, add it with ``gid`` or the next free system id."""
        known = self.gid_of(name)
        if known is not None:
            return known
        taken = {_number(row[2]) for row in self.group}
        while gid in taken:
            gid += 1
        self.group.append([name, "x", str(gid), ""])
        return gid

    def add_member(self, group: str, user: str) -> None:
        for row in self.group:
            if row[0] == group and user not in row[3].split(","):
                row[3] = ",".join(filter(None, [row[3], user]))
        if group in self.gshadow:
            members = self.gshadow[group][3].split(",")
            if user not in members:
                self.gshadow[group][3] = ",".join(filter(None, [*members, user]))

    def add_default_user(self, *, single: bool) -> None:
        """Add ``sandbox``, uid 1000, member of ``sudo``. With a single id it is another name of id 0."""
        uid = 0 if single else USER_ID
        gid = 0 if single else self.add_group(USER, USER_ID)
        self.passwd.append([USER, "x", str(uid), str(gid), "sandbox", HOME, "/bin/bash"])
        self.add_group(SUDO_GROUP, 27)
        self.add_member(SUDO_GROUP, USER)

    def passwd_text(self) -> str:
        return _lines(self.passwd)

    def group_text(self) -> str:
        return _lines(self.group)

    def shadow_text(self) -> str:
        """Return shadow without passwords: ``*`` matches none, and nothing is copied from the host."""
        locked = (
            self.shadow.get(row[0], [row[0], "*", "19000", "0", "99999", "7", "", "", ""])
            for row in self.passwd
        )
        return _lines(locked)

    def gshadow_text(self) -> str:
        return _lines(self.gshadow.get(row[0], [row[0], "*", "", row[3]]) for row in self.group)


def _lines(rows: Iterable[AccountFields]) -> str:
    return "".join(":".join(row) + "\n" for row in rows)
