"""One machine of the lab: a QEMU process, its disk, and the agent in it that runs commands for us."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

from tests.vm.debian import LabFailed, command

AT_ONCE = int(os.environ.get("SANDKEEP_VM_AT_ONCE", "2"))
BOOT_SECONDS = 1800.0
BOOT_PROCESSOR_SECONDS = 400.0
"""What a boot may cost, however busy this machine is. It costs 30 to 90; a kernel that hangs spins."""
COMMAND_SECONDS = 600.0
KERNEL_LINE = (
    "root=/dev/vda rootfstype=ext4 rw console=ttyS0 quiet panic=-1 systemd.unified_cgroup_hierarchy=1 "
    "systemd.show_status=0 mitigations=off random.trust_cpu=on no_timer_check"
)

How = Literal["plain", "login", "service"]


@dataclass(frozen=True)
class Image:
    """What machines with one kernel start from. Nobody writes to it."""

    name: str
    release: str
    """As `uname -r` says."""
    vmlinuz: Path
    initrd: Path
    disk: Path
    payload: Path


@dataclass(frozen=True)
class Result:
    command: str
    status: int | None
    """Negative for a signal; none when the time was up."""
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)

    def __str__(self) -> str:
        ended = "did not end in time" if self.status is None else f"ended with {self.status}"
        return f"{self.command}\n{ended}\n--- out\n{self.out}--- err\n{self.err}---"


class CommandFailed(AssertionError):
    """A command in a machine ended with another status than it should have."""


class MachineEnded(LabFailed):
    """The machine is off, or went off before it answered."""


class Job:
    """A command that runs in the machine while the caller does other things."""

    def __init__(self, machine: Machine, command: str, timeout: float) -> None:
        self._machine, self._command, self._timeout = machine, command, timeout
        self.answers: SimpleQueue[dict[str, Any] | None] = SimpleQueue()

    def ended(self) -> Result | None:
        """How it ended, if it has; what is asked for to run on is not waited for any more then."""
        return None if self.answers.empty() else self.wait(check=False)

    def wait(self, *, check: bool = True) -> Result:
        try:
            # The agent ends what takes too long. If it says nothing at all, the machine hangs.
            answer = self.answers.get(timeout=self._timeout + 60)
        except Empty:
            raise LabFailed(self._machine.told(f"no answer to: {self._command}")) from None
        if answer is None:
            raise MachineEnded(self._machine.told(f"the machine ended before: {self._command}"))
        result = Result(self._command, answer["status"], answer["out"], answer["err"])
        if check and result.status != 0:
            raise CommandFailed(self._machine.told(str(result)))
        return result


class Machine:
    """A machine with a disk of its own, which it keeps from boot to boot.

    ``boot`` and ``close`` are called by whoever makes it. What tests do in between: ``run`` and ``start``
    commands, ``reboot`` in good order, ``crash`` the kernel, ``kill`` the machine as a power cut does, and
    ``boot`` it again.
    """

    def __init__(self, image: Image, scratch: Path, *, memory: int = 2048, processors: int = 2) -> None:
        self.image = image
        self.boots = 0
        self.disk = scratch / "disk.qcow2"
        self._scratch, self._memory, self._processors = scratch, memory, processors
        self._qemu: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._slot = contextlib.ExitStack()
        self._jobs: dict[int, Job] = {}
        self._hello: SimpleQueue[str | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._next = 0
        scratch.mkdir(parents=True, exist_ok=True)
        form = ["-f", "qcow2", "-F", "raw"]
        command("qemu-img", "create", "-q", *form, "-b", image.disk.resolve(), self.disk)

    # --- power -------------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        return self._qemu is not None and self._qemu.poll() is None

    def boot(self, *, timeout: float = BOOT_SECONDS) -> float:
        """Switch on and wait for the agent. Returns how many seconds that took."""
        if self._qemu is not None:
            raise LabFailed("the machine is on")
        self._slot.enter_context(_one_of_few(self.image.payload.parents[1]))
        self.boots += 1
        began = time.monotonic()
        ours, theirs = socket.socketpair()
        with theirs, (self._scratch / "qemu.log").open("ab") as log:
            self._qemu = subprocess.Popen(
                self._argv(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
            )
        self._line, self._hello = ours, SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()
        if not self._greeted(began + timeout):
            told = self.told(f"kernel {self.image.release} did not boot")
            self.kill()
            raise LabFailed(told)
        return time.monotonic() - began

    def _greeted(self, deadline: float) -> bool:
        assert self._qemu is not None
        while time.monotonic() < deadline and processor_seconds(self._qemu.pid) < BOOT_PROCESSOR_SECONDS:
            with contextlib.suppress(Empty):
                return self._hello.get(timeout=1) is not None
        return False

    def kill(self) -> None:
        """Cut the power: memory is lost, and so is what the disk was not told to keep."""
        if self._qemu is not None:
            self._qemu.kill()
            self._off()

    def shutdown(self) -> None:
        self.start("systemctl poweroff")
        self._wait_off("did not power off")

    def reboot(self) -> float:
        """In good order: services are stopped, filesystems unmounted."""
        self.start("systemctl reboot")
        self._wait_off("did not reboot")
        return self.boot()

    def crash(self) -> None:
        """A kernel panic. The machine is off afterwards."""
        self.start("echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger")
        self._wait_off("did not crash")

    def close(self) -> None:
        self.kill()
        self.disk.unlink(missing_ok=True)

    def _argv(self, line: int) -> list[str]:
        disk = f"file={self.disk},format=qcow2,if=virtio,cache=writeback,discard=unmap"
        payload = f"file={self.image.payload},format=raw,if=virtio,readonly=on"
        return [
            *("setpriv", "--pdeathsig", "KILL", "--", "qemu-system-x86_64"),  # it ends with this process
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            # One thread for all processors: with one each, a guest's kernel was seen to crash on a busy host.
            *("-accel", "tcg,thread=single", "-cpu", "max", "-smp", str(self._processors)),
            *("-m", str(self._memory), "-object", "rng-random,id=rng,filename=/dev/urandom"),
            *("-device", "virtio-rng-pci,rng=rng"),
            *("-kernel", str(self.image.vmlinuz), "-initrd", str(self.image.initrd), "-append", KERNEL_LINE),
            *("-drive", disk, "-drive", payload),
            *("-serial", f"file:{self._console()}"),
            *("-device", "virtio-serial-pci", "-chardev", f"socket,id=agent,fd={line}"),
            *("-device", "virtserialport,chardev=agent,name=sandkeep.lab"),
        ]

    def _wait_off(self, otherwise: str, *, timeout: float = BOOT_SECONDS) -> None:
        assert self._qemu is not None
        try:
            self._qemu.wait(timeout)
        except subprocess.TimeoutExpired:
            raise LabFailed(self.told(f"the machine {otherwise}")) from None
        self._off()

    def _off(self) -> None:
        assert self._qemu is not None and self._line is not None and self._reader is not None
        self._qemu.wait()
        self._line.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._line.close()
        self._qemu = self._line = self._reader = None
        self._slot.close()

    # --- commands ----------------------------------------------------------------------------------

    def run(
        self,
        command: str | Sequence[str],
        *,
        user: str = "root",
        how: How | None = None,
        input: str = "",
        env: Mapping[str, str] | None = None,
        timeout: float = COMMAND_SECONDS,
        check: bool = True,
    ) -> Result:
        """Run a command (a string goes to bash) and wait for its end; another status than 0 is a failure.

        How: "plain", as a child of the agent, which is a system service without delegation; "login", in a
        session as ssh gives; "service", in a unit of its own with Delegate=yes, of the user's own manager
        for anybody but root. By itself root's is plain and other users' a login.
        """
        job = self.start(command, user=user, how=how, input=input, env=env, timeout=timeout)
        return job.wait(check=check)

    def start(
        self,
        command: str | Sequence[str],
        *,
        user: str = "root",
        how: How | None = None,
        input: str = "",
        env: Mapping[str, str] | None = None,
        timeout: float = COMMAND_SECONDS,
    ) -> Job:
        """Run a command without waiting for it."""
        if self._line is None:
            raise MachineEnded("the machine is off")
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        how = how or ("plain" if user == "root" else "login")
        job = Job(self, f"[{user}, {how}] {shlex.join(argv)}", timeout)
        with self._lock:
            self._next += 1
            number = self._next
            self._jobs[number] = job
        message = {"id": number, "argv": _wrapped(argv, user, how, dict(env or {})), "env": {}}
        message |= {"input": input, "timeout": timeout}
        try:
            self._line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            job.answers.put(None)
        return job

    def write(self, path: str, text: str, *, user: str = "root") -> None:
        self.run(["bash", "-c", 'cat >"$1"', "-", path], input=text, user=user, how="plain")

    def read(self, path: str) -> str:
        return self.run(["cat", path]).out

    def _read(self, line: socket.socket) -> None:
        """Hand out what the agent sends, until the machine is off."""
        try:
            with line.makefile("rb") as lines:
                for text in lines:
                    message = json.loads(text)
                    if "hello" in message:
                        self._hello.put(message["hello"])
                    else:
                        self._jobs.pop(message["id"]).answers.put(message)
        except (OSError, ValueError):
            pass  # cut off in the middle of a line
        self._hello.put(None)
        with self._lock:
            for job in self._jobs.values():
                job.answers.put(None)
            self._jobs.clear()

    # --- what is told when something fails ---------------------------------------------------------

    def _console(self) -> Path:
        return self._scratch / f"console-{self.boots}.log"

    def console(self) -> str:
        """What the kernel and init wrote since the machine was last switched on."""
        try:
            return self._console().read_text(errors="replace").replace("\r", "")
        except FileNotFoundError:
            return ""

    def told(self, what: str) -> str:
        """A failure, with what the machine itself had to say."""
        qemu = (self._scratch / "qemu.log").read_text(errors="replace")[-2000:]
        tail = "\n".join(self.console().splitlines()[-40:])
        told = f"{what}\n--- console of {self.image.name} ({self.image.release}), boot {self.boots}\n{tail}"
        return told + (f"\n--- QEMU\n{qemu}" if qemu else "")


def _wrapped(argv: list[str], user: str, how: How, env: dict[str, str]) -> list[str]:
    with_env = ["env", *(f"{name}={value}" for name, value in env.items()), *argv] if env else argv
    if how == "login":
        return ["runuser", "-l", user, "-c", shlex.join(with_env)]
    home = "/root" if user == "root" else f"/home/{user}"
    as_user = with_env
    if user != "root":
        runtime = f'XDG_RUNTIME_DIR="/run/user/$(id -u {user})"'
        switch = f"setpriv --reuid {user} --regid {user} --init-groups env HOME={home} USER={user} {runtime}"
        as_user = ["bash", "-c", f'cd {home}; exec {switch} "$@"', "-", *with_env]
    if how == "plain":
        return as_user
    unit = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect", f"--working-directory={home}"]
    # Servers and sessions live on after the command that started them, as they do after a login.
    unit += ["-p", "Delegate=yes", "-p", "KillMode=process", "-p", "SendSIGKILL=no"]
    if user == "root":
        return [*unit, f"--setenv=HOME={home}", *with_env]
    inner = shlex.join([*unit, "--user", *with_env])
    manager = f"systemctl start user@$(id -u {user}).service"
    return ["bash", "-c", f"{manager} && cd {home} && exec {switch} {inner}"]


def processor_seconds(pid: int) -> float:
    """What a process of ours has used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _one_of_few(directory: Path) -> Iterator[None]:
    """Wait until fewer than so many machines run from the same cache."""
    while True:
        for slot in range(AT_ONCE):
            with open(directory / f"machine-{slot}.lock", "w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield
                return
        time.sleep(0.2)
