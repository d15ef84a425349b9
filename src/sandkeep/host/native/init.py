"""PID 1 of a session: spawns what the supervisor asks for, reaps everything, does nothing else.

It runs from the host's interpreter inside the sandbox, so it imports everything before the root is switched,
is not dumpable, holds three descriptors besides /dev/null, and never touches the data of the processes it
starts: pipes are made by the supervisor and handed through.

Messages on the control socket are JSON objects, one per packet; a message too long for a packet travels in a
memory file. From the supervisor: ``exec``, ``signal``, ``killtree``, ``freeze``, ``thaw``. To it:
``started``/``failed`` and ``frozen`` answers, ``exit`` events. When the supervisor dies the socket closes,
init exits, and the kernel kills all that is left.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import termios
import time
from typing import Any, Final, NoReturn

from sandkeep.linux import sockets, syscalls

_TIOCSPTLCK: Final = 0x40045431
_TIOCGPTN: Final = 0x80045430
_DEFAULT_SIGNALS: Final = [
    number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)
]
_DEAD: Final = (b"Z", b"X")
_STOPPED: Final = (b"T", b"t")
_IO_SECONDS: Final = 0.1
_VICTIM: Final = b"500"
"""Raised oom_score_adj of everything spawned: init is the last one the kernel should choose."""


class Refused(Exception):
    """A request that could not be carried out: at which step, and why."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(step)
        self.step = step
        self.number = number


class Init:
    def __init__(self, control: socket.socket, *, switch_ids: bool) -> None:
        self._control = control
        self._switch_ids = switch_ids
        self._children: dict[int, str] = {}
        self._shims: dict[int, Shim] = {}
        self._stopped_before: set[int] | None = None
        self._put_off: list[tuple[dict[str, Any], list[int]]] = []
        self._wake, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._poll.register(control.fileno(), select.EPOLLIN)
        self._poll.register(self._wake, select.EPOLLIN)

    def run(self) -> NoReturn:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._wake:
                    self._drain_wake()
                    self._reap()
                elif fd == self._control.fileno():
                    self._serve()
                else:
                    self._hear_shim(next((shim for shim in self._shims.values() if shim.pipe == fd), None))

    # --- requests ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        data, fds = sockets.receive(self._control)
        if not data:
            os._exit(0)
        try:
            if data == b"M":
                data = _read_all(fds.pop(0))
            request = json.loads(data)
            op = request["op"]
            if op == "exec" and self._stopped_before is not None:
                self._put_off.append((request, fds))
                fds = []
            elif op == "exec":
                self._exec(request, fds)
            elif op == "freeze":
                self._freeze(request["seconds"])
            elif op == "thaw":
                self._thaw()
            elif op == "signal":
                self._signal(request["pid"], request["signal"], only=request.get("only", False))
            elif op == "killtree":
                self._kill_tree(request["id"])
        finally:
            for fd in fds:
                os.close(fd)

    def _exec(self, request: dict[str, Any], fds: list[int]) -> None:
        master = -1
        try:
            if request["pty"]:
                master, terminal = _open_terminal(request["pty"], request["uid"] if self._switch_ids else 0)
                actions: list[tuple[Any, ...]] = [
                    (os.POSIX_SPAWN_OPEN, 0, terminal, os.O_RDWR, 0),
                    (os.POSIX_SPAWN_DUP2, 0, 1),
                    (os.POSIX_SPAWN_DUP2, 0, 2),
                ]
            else:
                actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(fds)]
            if request["shim"] or request["rlimits"]:
                shim = Shim(self, request, actions)
                pid = shim.main
                self._shims[shim.pid] = shim
                self._poll.register(shim.pipe, select.EPOLLIN)
            else:
                pid = self._spawn(request, actions)
                self._children[pid] = request["id"]
            _expose_to_oom(pid)
        except Refused as refusal:
            answer = {"failed": request["id"], "step": refusal.step, "errno": refusal.number}
            self._control.send(json.dumps(answer).encode())
        else:
            answer = {"started": request["id"], "pid": pid}
            sockets.send(self._control, json.dumps(answer).encode(), [master] if master >= 0 else None)
        finally:
            if master >= 0:
                os.close(master)

    def _spawn(self, request: dict[str, Any], actions: list[tuple[Any, ...]]) -> int:
        """Spawn as the requested user. Saved ids stay 0, so the way back is open; exec closes it."""
        uid, gid = request["uid"], request["gid"]
        try:
            if self._switch_ids:
                os.setgroups(request["groups"])
                os.setresgid(gid, gid, 0)
                os.setresuid(uid, uid, 0)
            _enter_directory(request["cwd"])
            path = _find(request["argv"][0], request["path"])
            environment = dict(item.split("=", 1) for item in request["env"])
            try:
                return os.posix_spawn(
                    path,
                    request["argv"],
                    environment,
                    file_actions=actions,
                    setsid=True,
                    setsigmask=[],
                    setsigdef=_DEFAULT_SIGNALS,
                )
            except OSError as error:
                # The kernel says "no such file" for a missing interpreter too.
                step = "interpreter" if error.errno == errno.ENOENT and os.path.exists(path) else "exec"
                raise Refused(step, error.errno or errno.EINVAL) from error
            except ValueError as error:  # a NUL byte, or text that no byte string stands for
                raise Refused("exec", errno.EINVAL) from error
        finally:
            os.chdir("/")
            if self._switch_ids:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
                os.setgroups([])

    def _signal(self, pid: int, number: int, *, only: bool) -> None:
        """A process group (``only`` one process), or with pid -1 everything but ourselves."""
        try:
            os.kill(pid if only or pid < 0 else -pid, number)
        except ProcessLookupError:
            pass

    def _freeze(self, seconds: float) -> None:
        """Stop everything but ourselves by signal, and answer once it stands still, or did not in time.

        A signal is only sent, never there at once: until a look finds every thread stopped, some still run.
        """
        if self._stopped_before is None:
            self._stopped_before = {pid for pid, state, _ in _tasks() if state == b"T"}
        started = time.monotonic()
        while True:
            self._signal(-1, signal.SIGSTOP, only=True)
            waited = time.monotonic() - started
            still = not _moving(_tasks(), trust_sleepers=waited > _IO_SECONDS)
            if still or waited > seconds:
                break
            time.sleep(0.001)
        self._control.send(json.dumps({"frozen": still}).encode())

    def _thaw(self) -> None:
        """Go on with everything, except what the session had stopped itself."""
        before, self._stopped_before = self._stopped_before or set(), None
        for pid in {pid for pid, _, _ in _tasks()} - before:
            self._signal(pid, signal.SIGCONT, only=True)
        put_off, self._put_off = self._put_off, []
        for request, fds in put_off:
            try:
                self._exec(request, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _kill_tree(self, request: str) -> None:
        for shim in self._shims.values():
            if shim.request == request:
                shim.kill()
                return

    # --- children ----------------------------------------------------------------------------------------

    def _drain_wake(self) -> None:
        try:
            while os.read(self._wake, 4096):
                pass
        except BlockingIOError:
            pass

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._shims:
                shim = self._shims.pop(pid)
                if os.WIFSIGNALED(status):
                    self._kill_strays(shim)
                self._hear_shim(shim)
                shim.close()
            elif pid in self._children:
                self._report(self._children.pop(pid), pid, status, usage.ru_utime + usage.ru_stime)

    def _kill_strays(self, shim: Shim) -> None:
        """Somebody inside killed a shim, to escape from it: what it held has become ours. Kill that.

        It cannot be told from orphans that others left us since the shim began. They die with it.
        """
        while True:
            ours = self._children.keys() | self._shims.keys() | shim.orphans_before
            strays = [pid for pid in _children_of(1) if pid not in ours]
            if not strays:
                return
            for stray in strays:
                _kill_all([stray, *_descendants(stray)])

    def _hear_shim(self, shim: Shim | None) -> None:
        """The command behind a shim has ended, or the shim died and took the news with it."""
        if shim is None or shim.reported:
            return
        shim.reported = True
        self._poll.unregister(shim.pipe)
        news = _read_line(shim.pipe)
        self._report(shim.request, shim.main, news.get("status", signal.SIGKILL), news.get("cpu", 0.0))

    def _report(self, request: str, pid: int, status: int, cpu_seconds: float) -> None:
        event = {"exit": request, "pid": pid, "status": status, "cpu_ms": round(cpu_seconds * 1000)}
        self._control.send(json.dumps(event).encode())


class Shim:
    """A process between init and one command, where there is no control group to hold its descendants.

    As a child subreaper it adopts every orphan below it, so all descendants stay reachable by parent links
    and ``kill`` can find them, whatever they did to their session or group. It also sets resource limits,
    which ``posix_spawn`` cannot.
    """

    def __init__(self, init: Init, request: dict[str, Any], actions: list[tuple[Any, ...]]) -> None:
        self.request = request["id"]
        self.orphans_before = set(_children_of(1)) if request["shim"] else set()
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read_end)
            self._run(init, request, actions, write_end)
        os.close(write_end)
        self.pipe = read_end
        self.reported = False
        answer = _read_line(read_end)
        if "failed" in answer:
            os.close(read_end)
            os.waitpid(self.pid, 0)
            raise Refused(answer["failed"], answer["errno"])
        self.main: int = answer["started"]

    def _run(
        self, init: Init, request: dict[str, Any], actions: list[tuple[Any, ...]], report: int
    ) -> NoReturn:
        try:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                for number, soft, hard in request["rlimits"]:
                    _set_limit(number, soft, hard)
                main = init._spawn(request, actions)
            except Refused as refusal:
                _write_line(report, {"failed": refusal.step, "errno": refusal.number})
                os._exit(1)
            _write_line(report, {"started": main})
            # Only the report pipe: holding the command's own pipes open would hide its end of file.
            for fd in os.listdir("/proc/self/fd"):
                if int(fd) > 2 and int(fd) != report:
                    try:
                        os.close(int(fd))
                    except OSError:
                        pass
            while True:
                try:
                    pid, status, usage = os.wait4(-1, 0)
                except ChildProcessError:
                    os._exit(0)
                if pid == main:
                    _write_line(report, {"status": status, "cpu": usage.ru_utime + usage.ru_stime})
                    if not request["shim"]:
                        os._exit(0)
        finally:
            os._exit(1)

    def close(self) -> None:
        os.close(self.pipe)

    def kill(self) -> None:
        """Kill every descendant, again and again until a look finds none, then the shim itself."""
        while victims := _descendants(self.pid):
            _kill_all(victims)


def _kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _children_of(pid: int) -> list[int]:
    return _family().get(pid, [])


def _descendants(root: int) -> list[int]:
    """Living descendants of a process, by parent links."""
    parents = _family()
    found: list[int] = []
    pending = [root]
    while pending:
        children = parents.get(pending.pop(), [])
        found += children
        pending += children
    return found


def _family() -> dict[int, list[int]]:
    """Living children of every process."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        state, parent = _state(f"/proc/{name}")
        if state not in _DEAD:
            parents.setdefault(parent, []).append(int(name))
    return parents


def _tasks() -> list[tuple[int, bytes, int]]:
    """Every living thread but our own: process, state, parent process."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            threads = os.listdir(f"/proc/{name}/task")
        except OSError:
            continue
        for thread in threads:
            state, parent = _state(f"/proc/{name}/task/{thread}")
            if state not in _DEAD:
                found.append((int(name), state, parent))
    return found


def _moving(tasks: list[tuple[int, bytes, int]], *, trust_sleepers: bool) -> bool:
    """Whether a thread may still do something before it notices that it is stopped.

    One that waits uninterruptibly is likely in the middle of I/O, which ends. The exception is ``vfork``: it
    lasts until the child, stopped too, has run its program.
    """
    waits_for_child = {parent for _, state, parent in tasks if state in _STOPPED} if trust_sleepers else set()
    return any(
        state not in _STOPPED and not (state == b"D" and pid in waits_for_child) for pid, state, _ in tasks
    )


def _state(directory: str) -> tuple[bytes, int]:
    """State and parent of a process or thread, by its directory in /proc."""
    try:
        with open(f"{directory}/stat", "rb") as handle:
            fields = handle.read().rsplit(b")", 1)[1].split()
    except OSError:
        return b"X", 0
    return fields[0], int(fields[1])


def _open_terminal(size: list[int], owner: int) -> tuple[int, str]:
    """A new pseudo-terminal: its master, and the path of its other end for the child to open after setsid."""
    try:
        master = os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise Refused("pty", error.errno or errno.EIO) from error
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        number = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, b"\0" * 4))[0]
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", size[0], size[1], 0, 0))
        path = f"/dev/pts/{number}"
        if owner:
            os.chown(path, owner, -1)
    except OSError as error:
        os.close(master)
        raise Refused("pty", error.errno or errno.EIO) from error
    return master, path


def _enter_directory(path: str) -> None:
    try:
        os.chdir(path)
        where = os.getcwd()
    except (OSError, ValueError) as error:
        raise Refused("cwd", getattr(error, "errno", None) or errno.EINVAL) from error
    if where.startswith("(unreachable)"):
        raise Refused("cwd", errno.ENOENT)


def _find(command: str, search: str) -> str:
    """The file a command names, looked up as the shell does in the request's own PATH."""
    try:
        os.fsencode(command + search)
    except ValueError as error:
        raise Refused("exec", errno.EINVAL) from error
    if "\0" in command:
        raise Refused("exec", errno.EINVAL)
    if "/" in command:
        return command
    seen = errno.ENOENT
    for directory in search.split(":"):
        candidate = f"{directory or '.'}/{command}"
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
        if os.path.exists(candidate) and not os.path.isdir(candidate):
            seen = errno.EACCES
    raise Refused("find", seen)


def _expose_to_oom(pid: int) -> None:
    try:
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return  # gone already
    try:
        os.write(fd, _VICTIM)
    except OSError:
        pass
    finally:
        os.close(fd)


def _set_limit(number: int, soft: int, hard: int) -> None:
    try:
        resource.setrlimit(number, (soft, hard))
    except (OSError, ValueError) as error:
        raise Refused("limits", getattr(error, "errno", None) or errno.EINVAL) from error


def _read_all(fd: int) -> bytes:
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        parts = []
        while part := os.read(fd, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def _write_line(fd: int, body: dict[str, Any]) -> None:
    os.write(fd, json.dumps(body).encode() + b"\n")


def _read_line(fd: int) -> dict[str, Any]:
    line = bytearray()
    while (byte := os.read(fd, 1)) and byte != b"\n":
        line += byte
    body: dict[str, Any] = json.loads(line) if line else {}
    return body
