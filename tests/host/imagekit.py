"""Running things in a root filesystem without the driver, and rootfs material shared by tests.

``run_in`` mounts a ``Rootfs`` in namespaces of its own and runs a command as one of its users; ``call`` runs
one method of the image store the way the worker would: as root, or as uid 0 of a user namespace over a range
of ids (``subuid``) or a single id. Both happen in a child process, this file run as a program, because
namespaces cannot be left again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sandkeep.errors import SandkeepError, from_json
from sandkeep.host.images import Image, ImageStore
from sandkeep.host.images.tree import Mode
from sandkeep.host.rootfs import Rootfs
from sandkeep.linux import syscalls as sc

ORDINARY_ID = 23456
"""A uid no account has: rootless tests act as it."""
_SUBIDS = 900_000_000


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def call(data: str, mode: Mode, method: str, *args: Any, **kwargs: Any) -> Any:
    """``ImageStore(data, mode=mode).<method>(…)`` in a worker of that mode; images come back as ``Image``."""
    request = {"do": "call", "data": data, "mode": mode, "method": method, "args": args, "kwargs": kwargs}
    done = _child(request)
    if done.returncode or not done.stdout.strip():
        raise AssertionError(f"worker died: {done.stderr}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise from_json(answer["error"])
    return _revived(answer["value"])


def run_in(
    rootfs: Rootfs,
    mode: Mode,
    session: str,
    argv: Sequence[str],
    *,
    user: str | None = None,
    stdin: str = "",
    timeout: float = 120,
) -> Ran:
    """Run ``argv`` in ``rootfs`` with uppers below ``session``; later calls see what earlier ones did."""
    request = {
        "do": "run",
        "mode": mode,
        "rootfs": rootfs.to_json(),
        "session": session,
        "argv": list(argv),
        "user": user or rootfs.defaults.user,
    }
    done = _child(request, stdin=stdin, timeout=timeout)
    return Ran(done.returncode, done.stdout, done.stderr)


def own_directory(path: str, mode: Mode) -> str:
    """Make ``path`` a directory that the worker of that mode owns and can reach."""
    os.makedirs(path, exist_ok=True)
    if mode != "root":
        os.chown(path, ORDINARY_ID, ORDINARY_ID)
    above = path
    while (above := os.path.dirname(above)) != "/":
        info = os.stat(above)
        if not info.st_mode & 0o001:
            os.chmod(above, (info.st_mode & 0o7777) | 0o011)
    return path


def _child(
    request: dict[str, Any], stdin: str = "", timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, os.path.abspath(__file__), json.dumps(request)]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False, errors="replace"
    )


def _revived(value: Any) -> Any:
    if isinstance(value, list):
        return [_revived(item) for item in value]
    if isinstance(value, dict) and "slots" in value:
        return Image.from_json(value)
    return value


# --- in the child ----------------------------------------------------------------------------------------


def _enter(mode: Mode) -> None:
    """Become the worker: a private mount namespace, and rootless a user namespace with its id map."""
    if mode == "root":
        sc.unshare(sc.CLONE_NEWNS)
    else:
        ready_r, ready_w = os.pipe()
        go_r, go_w = os.pipe()
        worker = os.fork()
        if worker:
            os.close(ready_w)
            os.close(go_r)
            os.read(ready_r, 1)
            _write_maps(worker, mode)
            os.write(go_w, b"x")
            os._exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) & 0xFF)
        os.setgroups([])
        os.setresgid(ORDINARY_ID, ORDINARY_ID, ORDINARY_ID)
        os.setresuid(ORDINARY_ID, ORDINARY_ID, ORDINARY_ID)
        sc.unshare(sc.CLONE_NEWUSER | sc.CLONE_NEWNS)
        os.write(ready_w, b"x")
        os.read(go_r, 1)
        for fd in (ready_r, ready_w, go_r, go_w):
            os.close(fd)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)


def _write_maps(pid: int, mode: Mode) -> None:
    lines = f"0 {ORDINARY_ID} 1\n"
    if mode == "subuid":
        lines += f"1 {_SUBIDS} 65535\n"
    else:
        with open(f"/proc/{pid}/setgroups", "w") as out:
            out.write("deny")
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{pid}/{name}", "w") as out:
            out.write(lines)


def _mount(rootfs: Rootfs, session: str) -> str:
    top = f"{session}/mnt"
    for slot in rootfs.slots:
        upper, work = f"{session}/fs/{slot.name}", f"{session}/work/{slot.name}"
        for path in (upper, work, top):
            os.makedirs(path, exist_ok=True)
        os.chmod(upper, 0o755)
        fs = sc.fsopen("overlay")
        for lower in slot.lowers:
            sc.fsconfig_string(fs, "lowerdir+", lower.path)
        sc.fsconfig_string(fs, "upperdir", upper)
        sc.fsconfig_string(fs, "workdir", work)
        if rootfs.flavour == "user":
            sc.fsconfig_flag(fs, "userxattr")
        else:
            sc.fsconfig_string(fs, "redirect_dir", "on")
        sc.fsconfig_create(fs)
        mounted = sc.fsmount(fs, sc.MOUNT_ATTR_NODEV)
        sc.move_mount(mounted, top + slot.target)
        os.close(mounted)
        os.close(fs)
    for bind in rootfs.binds:
        sc.mount(bind.source, top + bind.target, None, sc.MS_BIND)
    return top


def _run(request: dict[str, Any]) -> int:
    rootfs = Rootfs.from_json(request["rootfs"])
    top = _mount(rootfs, request["session"])
    sc.unshare(sc.CLONE_NEWPID | sc.CLONE_NEWUTS | sc.CLONE_NEWNET)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF
    try:
        sc.sethostname("sandbox")
        sc.mount("proc", f"{top}/proc", "proc")
        sc.mount("tmpfs", f"{top}/dev", "tmpfs", 0, "mode=755")
        for name in ("null", "zero", "full", "random", "urandom", "tty"):
            os.close(os.open(f"{top}/dev/{name}", os.O_CREAT | os.O_WRONLY))
            sc.mount(f"/dev/{name}", f"{top}/dev/{name}", None, sc.MS_BIND)
        for name, fd in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
            os.symlink(f"/proc/self/fd{fd}", f"{top}/dev/{name}")
        os.chroot(top)
        _become(request["user"], rootfs, request["mode"])
        os.execvpe(request["argv"][0], request["argv"], dict(rootfs.defaults.env))
    except BaseException as error:
        print(f"imagekit: {error!r}", file=sys.stderr)
    os._exit(125)


def _become(user: str, rootfs: Rootfs, mode: Mode) -> None:
    with open("/etc/passwd") as source:
        rows = [line.rstrip("\n").split(":") for line in source]
    row = next(row for row in rows if row[0] == user)
    with open("/etc/group") as source:
        groups = [line.rstrip("\n").split(":") for line in source]
    uid, gid = int(row[2]), int(row[3])
    if mode != "single":
        os.setgroups([gid, *(int(group[2]) for group in groups if user in group[3].split(","))])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    os.chdir(rootfs.defaults.cwd)


def _plain(value: Any) -> Any:
    if isinstance(value, Image):
        return value.to_json()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _main() -> int:
    request = json.loads(sys.argv[1])
    _enter(request["mode"])
    if request["do"] == "run":
        return _run(request)
    try:
        store = ImageStore(request["data"], mode=request["mode"])
        value = getattr(store, request["method"])(*request["args"], **request["kwargs"])
        print(json.dumps({"value": _plain(value)}))
    except SandkeepError as error:
        print(json.dumps({"error": error.to_json()}))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
