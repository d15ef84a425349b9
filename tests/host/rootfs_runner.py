"""Running things in a root filesystem without the driver, and rootfs material shared by tests.

``run_in`` mounts a ``Rootfs`` in namespaces of its own and runs a command as one of its users; ``call`` runs
one method of the image store the way the worker would: as root, or as uid 0 of a user namespace over a range
of ids (``subuid``) or a single id. Both happen in a child process, this file run as a program, because
namespaces cannot be left again.
"""

from __future__ import annotations

import base64
import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sandkeep.errors import SandkeepError, from_json
from sandkeep.host.images import Image, ImageStore
from sandkeep.host.images.hostimage.programs import sudo_script
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


def call(
    data: str,
    mode: Mode,
    method: str,
    *args: Any,
    python: str = sys.executable,
    hidden: Sequence[str] = (),
    root: str = "/",
    **kwargs: Any,
) -> Any:
    """``ImageStore(data, mode=mode).<method>(…)`` in a worker of that mode; images come back as ``Image``.

    The worker may be another interpreter, on a host where some paths are hidden or whose root is elsewhere.
    """
    request = {"do": "call", "data": data, "mode": mode, "method": method, "args": args, "kwargs": kwargs}
    request |= {"hidden": list(hidden), "root": root}
    done = _child(request, python=python)
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


@dataclass(frozen=True)
class Entry:
    """One name in a mounted root filesystem."""

    mode: int
    uid: int
    gid: int
    content: bytes
    """A file's bytes, a link's target."""


def look(rootfs: Rootfs, mode: Mode, session: str) -> dict[str, Entry]:
    """Every name in the merged view, for images that have no program to ask."""
    request = {"do": "look", "mode": mode, "rootfs": rootfs.to_json(), "session": session}
    done = _child(request)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    return {name: Entry(row[0], row[1], row[2], base64.b64decode(row[3])) for name, row in seen.items()}


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
    request: dict[str, Any], stdin: str = "", timeout: float = 300, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    command = [python, os.path.abspath(__file__), json.dumps(request)]
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def _revived(value: Any) -> Any:
    if isinstance(value, list):
        return [_revived(item) for item in value]
    if isinstance(value, dict) and "slots" in value:
        return Image.from_json(value)
    return value


# --- material ---------------------------------------------------------------------------------------------


def _skip(reason: str) -> NoReturn:
    import pytest  # not at the top: the child, which starts often, has no use for it

    pytest.skip(reason)


def require_root() -> None:
    if os.geteuid() != 0:
        _skip("needs root: it acts as root and as ordinary users in turn")


def require_program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        _skip(f"needs the program {name}")
    return found


def debian_rootfs(*packages: str) -> str:
    """A minimal Debian with python3 and certificates as a tar, built once per machine."""
    program = require_program("mmdebstrap")
    wanted = ",".join(sorted({"python3-minimal", "ca-certificates", *packages}))
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "sandkeep-tests")
    os.makedirs(cache, exist_ok=True)
    path = f"{cache}/debian-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}.tar"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            command = [program, "--quiet", "--variant=minbase", f"--include={wanted}", "bookworm"]
            done = subprocess.run([*command, f"{path}.new.tar"], capture_output=True, text=True, check=False)
            if done.returncode:
                _skip(f"mmdebstrap cannot build a Debian here: {done.stderr[-300:]}")
            os.rename(f"{path}.new.tar", path)
    return path


def tar_of(
    entries: Mapping[str, bytes | tuple[str, str] | None], *, uid: int = 0, gid: int = 0, mode: int = 0o644
) -> bytes:
    """An archive: bytes are files, ``None`` directories, ``("sym" or "hard", target)`` links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, value in entries.items():
            info = tarfile.TarInfo(name)
            info.uid, info.gid, info.mtime = uid, gid, 1_700_000_000
            if value is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(value, tuple):
                info.type = tarfile.SYMTYPE if value[0] == "sym" else tarfile.LNKTYPE
                info.linkname = value[1]
            else:
                info.size, info.mode = len(value), mode
            archive.addfile(info, io.BytesIO(value) if isinstance(value, bytes) else None)
    return out.getvalue()


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def zstd(data: bytes) -> bytes:
    return subprocess.run(
        [require_program("zstd"), "-qc1"], input=data, capture_output=True, check=True
    ).stdout


@dataclass
class OciImage:
    """An image as blobs by digest, written by code that shares nothing with what reads it."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    diff_ids: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    architecture: str = "amd64"

    def add(self, archive: bytes, compression: str = "gzip") -> OciImage:
        packed = {
            "gzip": lambda: gzip.compress(archive, 1, mtime=0),
            "zstd": lambda: zstd(archive),
            "": lambda: archive,
        }[compression]()
        kind = "application/vnd.oci.image.layer.v1.tar" + (f"+{compression}" if compression else "")
        self.layers.append(self._put(kind, packed))
        self.diff_ids.append(digest(archive))
        return self

    def config_bytes(self) -> bytes:
        body = {
            "architecture": self.architecture,
            "os": "linux",
            "config": self.config,
            "rootfs": {"type": "layers", "diff_ids": self.diff_ids},
        }
        return json.dumps(body).encode()

    def manifest(self) -> dict[str, Any]:
        """The manifest's descriptor; manifest and configuration are then among the blobs."""
        kind = "application/vnd.oci.image.manifest.v1+json"
        config = self._put("application/vnd.oci.image.config.v1+json", self.config_bytes())
        body = {"schemaVersion": 2, "mediaType": kind, "config": config, "layers": self.layers}
        return self._put(kind, json.dumps(body).encode())

    def _put(self, kind: str, data: bytes) -> dict[str, Any]:
        self.blobs[digest(data)] = data
        return {"mediaType": kind, "digest": digest(data), "size": len(data)}


def write_layout(path: str, images: Mapping[str, OciImage]) -> str:
    """Images by reference name as an OCI image layout."""
    os.makedirs(f"{path}/blobs/sha256")
    entries = []
    for name, image in images.items():
        descriptor = image.manifest()
        entries.append({**descriptor, "annotations": {"org.opencontainers.image.ref.name": name}})
        for key, data in image.blobs.items():
            with open(f"{path}/blobs/sha256/{key.removeprefix('sha256:')}", "wb") as out:
                out.write(data)
    with open(f"{path}/oci-layout", "w") as text:
        text.write('{"imageLayoutVersion": "1.0.0"}')
    with open(f"{path}/index.json", "w") as text:
        json.dump({"schemaVersion": 2, "manifests": entries}, text)
    return path


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
        # A worker can read the package it runs. This one changes its ids, and the clone may be in a home that
        # other users cannot enter; so the file of the package that is opened by path is read before.
        sudo_script()
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
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and children would inherit that
        os.execvpe(request["argv"][0], request["argv"], dict(rootfs.defaults.env))
    except BaseException as error:
        print(f"rootfs_runner: {error!r}", file=sys.stderr)
    os._exit(125)


def _look(request: dict[str, Any]) -> int:
    top = _mount(Rootfs.from_json(request["rootfs"]), request["session"])
    seen = {}
    for above, directories, files in os.walk(top):
        for name in (*directories, *files):
            path = os.path.join(above, name)
            info = os.lstat(path)
            content = b""
            if stat.S_ISLNK(info.st_mode):
                content = os.fsencode(os.readlink(path))
            elif stat.S_ISREG(info.st_mode) and info.st_size < 1 << 20:
                with open(path, "rb") as source:
                    content = source.read()
            row = [info.st_mode, info.st_uid, info.st_gid, base64.b64encode(content).decode()]
            seen[path.removeprefix(top)] = row
    print(json.dumps(seen))
    return 0


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
    if request["do"] == "look":
        return _look(request)
    for path in request["hidden"]:
        if os.path.isdir(path):
            sc.mount("none", path, "tmpfs")
        elif os.path.exists(path):
            sc.mount("/dev/null", path, None, sc.MS_BIND)
    os.chroot(request["root"])
    try:
        store = ImageStore(request["data"], mode=request["mode"])
        value = getattr(store, request["method"])(*request["args"], **request["kwargs"])
        print(json.dumps({"value": _plain(value)}))
    except SandkeepError as error:
        print(json.dumps({"error": error.to_json()}))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
