"""PID 1 of a session: spawns what the supervisor asks for, reaps everything, does nothing else.

It runs from the host's interpreter inside the sandbox, so it imports everything before the root is switched,
is not dumpable, holds three descriptors besides /dev/null, and never touches the data of the processes it
starts: the supervisor creates their pipes and passes them on.

Messages on the control socket are JSON objects, one per packet; a message too long for a packet travels in a
memory file. From the supervisor: ``exec``, ``signal``, ``signaltree``, ``freeze``, ``thaw``. To it:
``started``/``failed`` and ``frozen`` answers, ``exit`` events. When the supervisor dies the socket closes,
init exits, and the kernel kills all other processes of the session.

Every process is spawned in a UTS namespace of its own, with the same host name. Its descendants inherit it
even if they change their session, group or parent, and no other process of the sandbox may make or enter one.
So the namespace identifies the descendants of a process, which parent links do not once a parent is gone.
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
_STILL_SECONDS: Final = 2.0
_LOOKS: Final = 20
"""How many scans look for descendants forked during a scan, before init stops everything to find them all."""
_VICTIM: Final = b"500"
"""Raised oom_score_adj of every spawned process, so that the kernel kills init last."""


class StepFailed(Exception):
    """A request that failed: at which step, and with which errno."""

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
        self._marks: dict[str, Mark] = {}
        """By request, of processes that run or whose descendants will be signalled later."""
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
                    self._read_shim(next((shim for shim in self._shims.values() if shim.pipe == fd), None))

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
            elif op == "signaltree":
                self._signal_tree(request["id"], request["signal"], to_come=request["to_come"])
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
                # Without input the child keeps init's own descriptor 0, which is /dev/null.
                first = 3 - len(fds)
                actions = [(os.POSIX_SPAWN_DUP2, fd, first + place) for place, fd in enumerate(fds)]
            self._mark(request["id"], limited=request["kill_after_ms"] is not None)
            if request["rlimits"]:
                shim = Shim(self, request, actions)
                pid = shim.main
                self._shims[shim.pid] = shim
                self._poll.register(shim.pipe, select.EPOLLIN)
            else:
                pid = self._spawn(request, actions)
                self._children[pid] = request["id"]
            _expose_to_oom(pid)
        except StepFailed as refusal:
            self._marks.pop(request["id"], None)
            answer = {"failed": request["id"], "step": refusal.step, "errno": refusal.number}
            self._control.send(json.dumps(answer).encode())
        else:
            answer = {"started": request["id"], "pid": pid}
            sockets.send(self._control, json.dumps(answer).encode(), [master] if master >= 0 else None)
        finally:
            if master >= 0:
                os.close(master)

    def _spawn(self, request: dict[str, Any], actions: list[tuple[Any, ...]]) -> int:
        """Spawn as the requested user. Saved ids stay 0, so init can switch back; exec resets them."""
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
                # The kernel reports "no such file" for a missing interpreter too.
                step = "interpreter" if error.errno == errno.ENOENT and os.path.exists(path) else "exec"
                raise StepFailed(step, error.errno or errno.EINVAL) from error
            except ValueError as error:  # a NUL byte, or text that cannot be encoded
                raise StepFailed("exec", errno.EINVAL) from error
        finally:
            os.chdir("/")
            if self._switch_ids:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
                os.setgroups([])

    def _signal(self, pid: int, number: int, *, only: bool) -> None:
        """Signal a process group (with ``only``, one process), or with pid -1 everything but init."""
        try:
            os.kill(pid if only or pid < 0 else -pid, number)
        except ProcessLookupError:
            pass

    def _freeze(self, seconds: float) -> None:
        still = self._stop_all(seconds)
        self._control.send(json.dumps({"frozen": still}).encode())

    def _stop_all(self, seconds: float) -> bool:
        """Stop everything but init by signal; return whether every thread stopped in time.

        Signals take effect later than they are sent: until a scan finds every thread stopped, some still run.
        """
        if self._stopped_before is None:
            self._stopped_before = {pid for pid, state, _ in _tasks() if state == b"T"}
        started = time.monotonic()
        while True:
            self._signal(-1, signal.SIGSTOP, only=True)
            waited = time.monotonic() - started
            still = not _moving(_tasks(), trust_sleepers=waited > _IO_SECONDS)
            if still or waited > seconds:
                return still
            time.sleep(0.001)

    def _continue_all(self) -> None:
        """Continue everything, except processes that the session itself had stopped."""
        before, self._stopped_before = self._stopped_before or set(), None
        for pid in {pid for pid, _, _ in _tasks()} - before:
            self._signal(pid, signal.SIGCONT, only=True)

    def _thaw(self) -> None:
        self._continue_all()
        put_off, self._put_off = self._put_off, []
        for request, fds in put_off:
            try:
                self._exec(request, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _mark(self, request: str, *, limited: bool) -> None:
        """Move to a new UTS namespace, where the next process is spawned."""
        try:
            syscalls.unshare(syscalls.CLONE_NEWUTS)
        except OSError as error:
            raise StepFailed("namespace", error.errno or errno.EINVAL) from error
        number = _namespace("self")
        # If the kernel reuses a number, no process of the earlier namespace is left.
        self._marks = {name: mark for name, mark in self._marks.items() if mark.number != number}
        self._marks[request] = Mark(number, limited)

    def _signal_tree(self, request: str, number: int, *, to_come: bool | None = None) -> None:
        """Signal a process and every descendant, each once.

        ``to_come``: whether another signal will follow, even if the process itself has ended by then;
        ``None`` leaves that as it is.
        """
        self._reap()  # so that the pid of a process that has just ended is not signalled
        mark = self._marks.get(request)
        if mark is None:
            return
        if to_come is not None:
            mark.limited = to_come
            if mark.ended and not to_come:
                del self._marks[request]
        sent: set[tuple[int, bytes]] = set()
        for _ in range(_LOOKS):
            fresh = self._marked(mark.number) - sent
            if not fresh:
                return
            # Oldest first: a shell that outlives its command would continue, or end with the command's code.
            for pid, _ in sorted(fresh, key=_age):
                self._signal(pid, number, only=True)
            sent |= fresh
        if number == signal.SIGKILL:
            self._kill_at_once(mark.number)

    def _kill_at_once(self, number: int) -> None:
        """Stop everything, then kill: processes that fork faster than init scans cannot while stopped.

        On a busy machine some may not stop in time, and fork. Each round leaves fewer of them.
        """
        checkpoint = self._stopped_before is not None
        for _ in range(_LOOKS):
            still = self._stop_all(_STILL_SECONDS)
            for pid, _ in self._marked(number):
                self._signal(pid, signal.SIGKILL, only=True)
            if still:
                break
        if not checkpoint:
            self._continue_all()

    def _marked(self, number: int) -> set[tuple[int, bytes]]:
        """Return living processes of a namespace and their descendants, each with its start time.

        Parent links find programs that may be run but not read: the kernel hides the namespace of those.
        """
        family, began = _family()
        pending = [pid for pid in began if pid != 1 and pid not in self._shims and _namespace(pid) == number]
        found: set[int] = set()
        while pending:
            pid = pending.pop()
            if pid not in found:
                found.add(pid)
                pending += family.get(pid, [])
        return {(pid, began[pid]) for pid in found}

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
                    # A process of the sandbox killed the shim, so the end of its command would not be
                    # reported.
                    self._signal_tree(shim.request, signal.SIGKILL)
                self._read_shim(shim)
                shim.close()
            elif pid in self._children:
                self._report(self._children.pop(pid), pid, status, usage.ru_utime + usage.ru_stime)

    def _read_shim(self, shim: Shim | None) -> None:
        """Report the end of the command behind a shim, also if the shim died without reporting it."""
        if shim is None or shim.reported:
            return
        shim.reported = True
        self._poll.unregister(shim.pipe)
        news = _read_line(shim.pipe)
        self._report(shim.request, shim.main, news.get("status", signal.SIGKILL), news.get("cpu", 0.0))

    def _report(self, request: str, pid: int, status: int, cpu_seconds: float) -> None:
        mark = self._marks.get(request)
        if mark is not None:
            mark.ended = True
            if not mark.limited:
                del self._marks[request]
        event = {"exit": request, "pid": pid, "status": status, "cpu_ms": round(cpu_seconds * 1000)}
        self._control.send(json.dumps(event).encode())


class Mark:
    """The number of the UTS namespace of a process and its descendants."""

    __slots__ = ("ended", "limited", "number")

    def __init__(self, number: int, limited: bool) -> None:
        self.number = number
        self.limited = limited
        """Whether a signal will follow, at a time limit or after a grace period: descendants get it even if
        the process itself has ended."""
        self.ended = False


class Shim:
    """A process between init and one command that sets resource limits, which ``posix_spawn`` cannot."""

    def __init__(self, init: Init, request: dict[str, Any], actions: list[tuple[Any, ...]]) -> None:
        self.request = request["id"]
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
            raise StepFailed(answer["failed"], answer["errno"])
        self.main: int = answer["started"]

    def _run(
        self, init: Init, request: dict[str, Any], actions: list[tuple[Any, ...]], report: int
    ) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                for number, soft, hard in request["rlimits"]:
                    _set_limit(number, soft, hard)
                main = init._spawn(request, actions)
            except StepFailed as refusal:
                _write_line(report, {"failed": refusal.step, "errno": refusal.number})
                os._exit(1)
            _write_line(report, {"started": main})
            # Keep only the report pipe: holding the command's own pipes open would hide its end of file.
            for fd in os.listdir("/proc/self/fd"):
                if int(fd) > 2 and int(fd) != report:
                    try:
                        os.close(int(fd))
                    except OSError:
                        pass
            _, status, usage = os.wait4(main, 0)
            _write_line(report, {"status": status, "cpu": usage.ru_utime + usage.ru_stime})
            os._exit(0)
        finally:
            os._exit(1)

    def close(self) -> None:
        os.close(self.pipe)


def _family() -> tuple[dict[int, list[int]], dict[int, bytes]]:
    """Return the living children of every process, and the start time of each living process."""
    children: dict[int, list[int]] = {}
    began: dict[int, bytes] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        state, parent, start = _state(f"/proc/{name}")
        if state not in _DEAD:
            children.setdefault(parent, []).append(int(name))
            began[int(name)] = start
    return children, began


def _age(process: tuple[int, bytes]) -> tuple[int, int]:
    """Return the sort key of a process: those that started earlier come first."""
    pid, began = process
    return int(began or 0), pid


def _namespace(pid: int | str) -> int:
    """Return the number of a process's UTS namespace; 0 if it is gone or may not be read."""
    try:
        return os.stat(f"/proc/{pid}/ns/uts").st_ino
    except OSError:
        return 0


def _tasks() -> list[tuple[int, bytes, int]]:
    """Return every living thread but init's own: process, state, parent process."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            threads = os.listdir(f"/proc/{name}/task")
        except OSError:
            continue
        for thread in threads:
            state, parent, _ = _state(f"/proc/{name}/task/{thread}")
            if state not in _DEAD:
                found.append((int(name), state, parent))
    return found


def _moving(tasks: list[tuple[int, bytes, int]], *, trust_sleepers: bool) -> bool:
    """Return whether a thread may still do something before it notices that it is stopped.

    A thread that waits uninterruptibly is likely in the middle of I/O, which ends. The exception is
    ``vfork``: it lasts until the child, stopped too, has run its program.
    """
    waits_for_child = {parent for _, state, parent in tasks if state in _STOPPED} if trust_sleepers else set()
    return any(
        state not in _STOPPED and not (state == b"D" and pid in waits_for_child) for pid, state, _ in tasks
    )


def _state(directory: str) -> tuple[bytes, int, bytes]:
    """Return state, parent and start time of a process or thread, given its directory in /proc."""
    try:
        with open(f"{directory}/stat", "rb") as handle:
            fields = handle.read().rsplit(b")", 1)[1].split()
    except OSError:
        return b"X", 0, b""
    return fields[0], int(fields[1]), fields[19]


def _open_terminal(size: list[int], owner: int) -> tuple[int, str]:
    """Open a pseudo-terminal; return its master, and the path that the child opens after setsid."""
    try:
        master = os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise StepFailed("pty", error.errno or errno.EIO) from error
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        number = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, b"\0" * 4))[0]
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", size[0], size[1], 0, 0))
        path = f"/dev/pts/{number}"
        if owner:
            os.chown(path, owner, -1)
    except OSError as error:
        os.close(master)
        raise StepFailed("pty", error.errno or errno.EIO) from error
    return master, path


def _enter_directory(path: str) -> None:
    try:
        os.chdir(path)
        where = os.getcwd()
    except (OSError, ValueError) as error:
        raise StepFailed("cwd", getattr(error, "errno", None) or errno.EINVAL) from error
    if where.startswith("(unreachable)"):
        raise StepFailed("cwd", errno.ENOENT)


def _find(command: str, search: str) -> str:
    """Return the file of a command, looked up as the shell does, in the request's own PATH."""
    try:
        os.fsencode(command + search)
    except ValueError as error:
        raise StepFailed("exec", errno.EINVAL) from error
    if "\0" in command:
        raise StepFailed("exec", errno.EINVAL)
    if "/" in command:
        return command
    seen = errno.ENOENT
    for directory in search.split(":"):
        candidate = f"{directory or '.'}/{command}"
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
        if os.path.exists(candidate) and not os.path.isdir(candidate):
            seen = errno.EACCES
    raise StepFailed("find", seen)


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
        raise StepFailed("limits", getattr(error, "errno", None) or errno.EINVAL) from error


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
