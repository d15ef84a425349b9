"""Users and groups of a session, from the sandbox's own account files, and acting as one of them.

``Accounts`` reads ``/etc/passwd`` and ``/etc/group`` through the root descriptor. The sandbox controls their
content: size is bounded, malformed rows are skipped, ids outside the session's range do not exist. The host's
own accounts are never read.

``ActingAs`` gives the calling thread, and only it, the file rights of an identity until the block ends.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple

from sandkeep.errors import HostCannot, InvalidRequest, LimitReached, NotFound, PathError
from sandkeep.linux import syscalls

ACCOUNT_FILE_LIMIT = 1 << 20
SESSION_IDS = 65536

# Capabilities of the session's root over files: chown, dac_override, fowner, fsetid, setfcap. Others that the
# supervisor has (reserved blocks, quotas, trusted attributes) must not apply to an operation of the sandbox.
_ROOT_CAPABILITIES = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 31

_QUERY = 0xFFFFFFFF
"""Invalid id: setting it changes nothing and returns the current one."""


class Identity(NamedTuple):
    """A user of the sandbox, in ids as the sandbox sees them."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    """Supplementary groups, the primary one included."""
    name: str
    home: str
    shell: str


ROOT = Identity(0, 0, (0,), "root", "/root", "/bin/sh")


class _Table(NamedTuple):
    key: tuple[int, ...]
    rows: list[list[bytes]]


_NO_KEY = (0,)


class Accounts:
    """The users and groups of one session. Safe to share between threads."""

    __slots__ = ("_groups", "_ids", "_root_fd", "_users")

    def __init__(self, root_fd: int, *, ids: int = SESSION_IDS) -> None:
        """``ids`` is the number of ids that the session's user namespace maps; higher ones do not exist."""
        self._root_fd = root_fd
        self._ids = ids
        self._users = _Table(_NO_KEY, [])
        self._groups = _Table(_NO_KEY, [])

    def resolve(self, user: str | int | None, *, default: str | int = "root") -> Identity:
        """Return the identity of ``user``: a name, a uid, or either followed by ``:group``.

        A uid needs no row in ``/etc/passwd``; its group is then the one of the same number. A group named
        explicitly replaces the primary group and leaves no supplementary ones. There is always a root.
        Raises ``NotFound`` (kind ``user`` or ``group``), ``InvalidRequest`` for an id out of range, and
        ``HostCannot`` where there is one id only.
        """
        wanted = default if user is None else user
        name, colon, group = str(wanted).partition(":")
        try:
            self._users = users = self._load("/etc/passwd", self._users)
            identity = self._user(os.fsencode(name), users.rows)
            if not colon:
                self._groups = groups = self._load("/etc/group", self._groups)
                return identity._replace(groups=self._memberships(identity, groups.rows))
        except (LimitReached, InvalidRequest, PathError):
            if name not in ("root", "0") or colon:
                raise
            return ROOT  # even without account files: root must be able to repair them
        self._groups = groups = self._load("/etc/group", self._groups)
        gid = self._group(os.fsencode(group), groups.rows)
        return identity._replace(gid=gid, groups=(gid,))

    def _user(self, name: bytes, rows: list[list[bytes]]) -> Identity:
        number = _number(name)
        by_number = None
        for row in rows:
            if len(row) < 7:
                continue
            uid, gid = _number(row[2]), _number(row[3])
            if uid is None or gid is None:
                continue
            if uid >= self._ids or gid >= self._ids:
                if row[0] == name and self._ids == 1:
                    self._check_range(max(uid, gid), "user")
                continue
            if row[0] != name and (uid != number or by_number is not None):
                continue
            home = row[5] if row[5].startswith(b"/") else b"/"
            found = Identity(
                uid, gid, (gid,), os.fsdecode(row[0]), os.fsdecode(home), os.fsdecode(row[6] or b"/bin/sh")
            )
            if row[0] == name:
                return found
            by_number = found
        if by_number is not None:
            return by_number
        if name == b"root" or number == 0:
            return ROOT
        if number is None:
            text = os.fsdecode(name)
            raise NotFound(f"no user {text!r} in the sandbox", kind="user", name=text)
        self._check_range(number, "user")
        return Identity(number, number, (number,), str(number), "/", "/bin/sh")

    def _group(self, name: bytes, rows: list[list[bytes]]) -> int:
        for row in rows:
            gid = _number(row[2]) if len(row) >= 3 else None
            if gid is not None and gid < self._ids and row[0] == name:
                return gid
        number = _number(name)
        if number is None:
            text = os.fsdecode(name)
            raise NotFound(f"no group {text!r} in the sandbox", kind="group", name=text)
        self._check_range(number, "group")
        return number

    def _memberships(self, identity: Identity, rows: list[list[bytes]]) -> tuple[int, ...]:
        name = os.fsencode(identity.name)
        found = {identity.gid}
        for row in rows:
            if len(row) < 4 or name not in row[3].split(b","):
                continue
            gid = _number(row[2])
            if gid is not None and gid < self._ids:
                found.add(gid)
        return tuple(sorted(found)[:65536])

    def _check_range(self, number: int, field: str) -> None:
        if number >= self._ids == 1:
            raise HostCannot(
                "every process in this session is root",
                part="users",
                why="the user who runs sandkeep has no subordinate ids, so there is one id inside",
                hint="'sandkeep doctor' says how to get subordinate ids",
            )
        if number >= self._ids:
            raise InvalidRequest(f"{field} {number} is not below {self._ids}", field=field)

    def _load(self, path: str, known: _Table) -> _Table:
        """Return the rows of ``path``, from ``known`` if the file has not changed."""
        try:
            fd = syscalls.openat2(self._root_fd, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return _Table(_NO_KEY, [])
        try:
            info = os.fstat(fd)
            key = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
            if key == known.key:
                return known
            if not stat.S_ISREG(info.st_mode) or syscalls.fstatfs_type(fd) in syscalls.KERNEL_FILESYSTEMS:
                return _Table(_NO_KEY, [])
            content = b""
            while len(content) <= ACCOUNT_FILE_LIMIT:
                chunk = os.read(fd, ACCOUNT_FILE_LIMIT + 1 - len(content))
                if not chunk:
                    break
                content += chunk
        except OSError as error:
            raise PathError(f"read {path}: {error.strerror}", path=path, errno=error.errno) from error
        finally:
            os.close(fd)
        if len(content) > ACCOUNT_FILE_LIMIT:
            raise LimitReached(
                f"{path} in the sandbox is larger than {ACCOUNT_FILE_LIMIT} bytes",
                limit="account file size",
                value=ACCOUNT_FILE_LIMIT,
            )
        return _Table(key, [line.split(b":") for line in content.split(b"\n") if b"\0" not in line])


def _number(text: bytes) -> int | None:
    # isdigit on bytes is ASCII only; ten digits hold every 32-bit id.
    return int(text) if text.isdigit() and len(text) <= 10 else None


class ActingAs:
    """Gives the calling thread the file rights of ``identity`` inside the ``with`` block.

    ``base`` is the host id of the session's id 0. A user other than root keeps no capability, so other
    users' private files stay private; root keeps those over files. Not to be nested. ``single`` sessions have
    one id, which is the supervisor's own: nothing is switched.
    """

    __slots__ = ("_base", "_capabilities", "_gid", "_groups", "_identity", "_single", "_uid")

    def __init__(self, identity: Identity, *, base: int = 0, single: bool = False) -> None:
        self._identity = identity
        self._base = base
        self._single = single

    def __enter__(self) -> None:
        if self._single:
            return
        identity, base = self._identity, self._base
        self._capabilities = effective, permitted, inheritable = syscalls.capget()
        self._groups = os.getgroups()
        syscalls.setgroups_thread([base + gid for gid in identity.groups])
        self._gid = syscalls.setfsgid(base + identity.gid)
        self._uid = syscalls.setfsuid(base + identity.uid)
        try:
            # These two calls report no failure, and without them the thread would act as the supervisor.
            if (
                syscalls.setfsuid(_QUERY) != base + identity.uid
                or syscalls.setfsgid(_QUERY) != base + identity.gid
            ):
                raise PermissionError(errno.EPERM, f"setfsuid: cannot act as {base + identity.uid}")
            keep = effective & _ROOT_CAPABILITIES if identity.uid == 0 else 0
            syscalls.capset(keep, permitted, inheritable)
        except BaseException:
            self._restore()
            raise

    def __exit__(self, *exception: object) -> None:
        if not self._single:
            self._restore()

    def _restore(self) -> None:
        # Capabilities first: the other calls need them.
        syscalls.capset(*self._capabilities)
        syscalls.setfsuid(self._uid)
        syscalls.setfsgid(self._gid)
        syscalls.setgroups_thread(self._groups)
