"""Find the way of mounting overlays that works here; the zygote tries the calls of sessions when it starts.

If none works no session can be made, and the error says what the kernel lacks and what helps.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from sandkeep.errors import IsolationUnavailable
from sandkeep.host.native import idrange, mounts
from sandkeep.linux import overlay, syscalls
from sandkeep.linux.overlay import Way

TRIAL_BASE = idrange.FIRST - idrange.SIZE
"""First id of a range for trials, which owns no file: just below the ranges of sessions."""


def choose(data_dir: str, mode: str, way: Way | None = None) -> Way:
    """Return the newest way that works, or ``way``, tried with the directories ``empty`` and ``sessions``.

    Raises:
        IsolationUnavailable: none works.
    """
    require_mount_setattr()
    if mode != "root":
        return _first_that_works(data_dir, way, userns=-1, base=0)
    with trial_namespace() as userns:
        require_idmap(data_dir, userns)
        return _first_that_works(data_dir, way, userns=userns, base=TRIAL_BASE)


def require_mount_setattr() -> None:
    try:
        syscalls.mount_setattr(-1, attr_set=syscalls.MOUNT_ATTR_NODEV)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            raise _refused("the kernel has no mount_setattr", error, "use Linux 5.12 or later") from error


def require_idmap(data_dir: str, userns: int) -> None:
    """Refuse a filesystem without idmapped mounts, by which root gives each session ids of its own."""
    plain = os.open(data_dir, os.O_PATH | os.O_CLOEXEC)
    try:
        os.close(mounts.clone_idmapped(plain, userns))
    except OSError as error:
        raise _refused(
            f"the filesystem of {data_dir} cannot be shown under other ids (idmapped)",
            error,
            "run as an ordinary user, or keep the data directory on ext4, xfs or btrfs",
        ) from error
    finally:
        os.close(plain)


def refusal(error: OSError, *, idmapped: bool) -> IsolationUnavailable:
    """Return the error for the case that no overlay can be mounted, from the last way that was tried."""
    if error.errno == errno.ENODEV:
        return _refused("the kernel has no overlay filesystem", error, "as root: modprobe overlay")
    if idmapped:
        hint = "run as an ordinary user, or use Linux 5.19 or later"
        return _refused("the kernel refuses an overlay on idmapped layers", error, hint)
    hint = "use Linux 5.12 or later, and a data directory on a local filesystem"
    return _refused("the kernel refuses an overlay in a user namespace", error, hint)


@contextmanager
def trial_namespace() -> Iterator[int]:
    """Yield the descriptor of a user namespace with a range of ids, like that of a session of root."""
    said, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            os.write(say, b"x")
            signal.pause()
        finally:
            os._exit(1)
    namespace = -1
    try:
        os.close(say)
        try:
            if not os.read(said, 1):
                raise OSError(errno.EPERM, "no user namespace can be made")
            for kind in ("uid_map", "gid_map"):
                with open(f"/proc/{pid}/{kind}", "w", encoding="ascii") as file:
                    file.write(f"0 {TRIAL_BASE} {idrange.SIZE}")
            namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise IsolationUnavailable(
                f"cannot build the id-range barrier: {error}",
                part="id-range",
                why=str(error),
                hint="run as an ordinary user, or outside the container that limits the ids",
            ) from error
        yield namespace
    finally:
        os.close(said)
        if namespace >= 0:
            os.close(namespace)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _first_that_works(data_dir: str, only: Way | None, *, userns: int, base: int) -> Way:
    flavour = "user" if userns < 0 else "trusted"
    anchor = f"{data_dir}/sessions"
    failure: OSError | None = None
    for way in (only,) if only else overlay.WAYS:
        builder = mounts.Builder(data_dir, userns=userns, base=base, way=way, anchor=anchor)
        try:
            builder.trial([f"{data_dir}/empty", f"{data_dir}/sessions"], flavour=flavour)
            return way
        except OSError as error:
            failure = error
        finally:
            builder.close()
    assert failure is not None
    raise refusal(failure, idmapped=userns >= 0)


def _refused(why: str, error: OSError, hint: str) -> IsolationUnavailable:
    return IsolationUnavailable(
        f"cannot build the root-filesystem barrier: {why} ({error})",
        part="root-filesystem",
        why=f"{why} ({error})",
        hint=hint,
    )
