"""netd: the process that is the network of every session below one data directory.

The engine starts it, confined, and registers sessions with it over a unix socket, each with its listeners and
its policy. netd outlives the engine that started it: sessions and their ports work while a server restarts,
and the next engine finds netd by its socket. It ends by itself once there is neither an engine nor a session.

A session that is not registered has no network, and the end of a supervisor ends its registration. So if any
of the processes dies, the result is a session without network, never one without policy.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn

import msgspec

from sandkeep import policy_json
from sandkeep.errors import (
    InternalError,
    InvalidRequest,
    NotFound,
    SandkeepError,
    files_exhausted,
)
from sandkeep.linux import sockets, syscalls
from sandkeep.net import confine, policy, turns
from sandkeep.net.audit import Audit
from sandkeep.net.channel import DescriptorChannel
from sandkeep.net.egress import Egress, EgressLimits, Flow, HostPorts, World, adopt
from sandkeep.net.ingress import Ingress
from sandkeep.net.leash import Leash
from sandkeep.net.resolver import Resolver
from sandkeep.net.sniff import TrafficKind
from sandkeep.version import __version__

PROTOCOL: Final = 3
SOCKET: Final = "netd.sock"
_LOCK: Final = "netd.lock"
_LOG: Final = "netd.log"
_LONGEST_LOG: Final = 1 << 20
_LOCK_SECONDS: Final = 10.0
_FIRST_WAIT: Final = 20.0
"""How long a new netd waits for an engine to connect."""
_REPORT_SECONDS: Final = 0.05
_TICK_SECONDS: Final = 2.0
_BATCH: Final = 500
_MOST_COMPLAINTS: Final = 200


class Registered:
    """A session that netd serves."""

    def __init__(self, egress: Egress, leash: Leash) -> None:
        self.egress = egress
        self.leash = leash
        self.reported = (0, 0)

    def new_bytes(self) -> tuple[int, int]:
        """Return bytes in and out since the last call."""
        now = self.egress.usage()
        before, self.reported = self.reported, now
        return now[0] - before[0], now[1] - before[1]


class Daemon:
    def __init__(
        self, control: socket.socket, *, owner: int, absent: dict[str, str], upstream: ssl.SSLContext | None
    ) -> None:
        self._control = control
        self._upstream = upstream
        self._owner = owner
        self._absent = absent
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._channel: DescriptorChannel | None = None
        self._sessions: dict[str, Registered] = {}
        self._ended_usage: dict[str, tuple[int, int]] = {}
        self._reporting: asyncio.TimerHandle | None = None
        self._complaints = 0
        self._authority: dict[str, Any] = {}
        self.world = World(Resolver(), Audit(self._report_soon))
        self.ingress = Ingress(self._egress_of, self._get_sockets)

    async def run(self) -> None:
        self._loop.set_exception_handler(self._complain)
        self._loop.set_task_factory(turns.make_task)
        self._loop.add_signal_handler(signal.SIGTERM, self._over.set)
        self._loop.add_reader(self._control.fileno(), self._on_engine)
        self._loop.call_later(_FIRST_WAIT, self._leave_if_unused)
        self._tick()
        await self._over.wait()
        for session in list(self._sessions):
            self._forget(session)
        self.ingress.close()
        if self._channel is not None:
            self._channel.close()

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an unforeseen error, a limited number of times: a session may be able to provoke it."""
        del loop
        self._complaints += 1
        if self._complaints <= _MOST_COMPLAINTS:
            error = context.get("exception")
            lines = traceback.format_exception(error) if error is not None else [context["message"] + "\n"]
            sys.stderr.write("".join(lines))
            sys.stderr.flush()

    def _leave_if_unused(self) -> None:
        if self._channel is None and not self._sessions:
            self._over.set()

    # --- the engine --------------------------------------------------------------------------------------

    def _on_engine(self) -> None:
        try:
            sock, _ = self._control.accept()
        except OSError:
            return
        channel = DescriptorChannel(sock, self._on_message, lambda: self._on_gone(channel))
        if channel.peer()[1] not in (self._owner, 0):
            channel.close()
            return
        previous, self._channel = self._channel, channel
        if previous is not None:
            previous.close()
        self._report_soon()

    def _on_gone(self, channel: DescriptorChannel) -> None:
        if self._channel is channel:
            self._channel = None
            self._leave_if_unused()

    def _on_message(self, body: dict[str, Any], fds: list[int]) -> None:
        channel, request = self._channel, body.get("id")
        if channel is None:
            return
        try:
            operation = _OPERATIONS[body["op"]]
            result = operation(self, body, fds)
        except SandkeepError as error:
            channel.refuse(request, error)
        except (LookupError, TypeError, ValueError, msgspec.ValidationError) as error:
            channel.refuse(request, InvalidRequest(f"malformed request: {type(error).__name__}: {error}"))
        except OSError as error:
            failure = files_exhausted(error) or InternalError(f"{body.get('op')}: {error}")
            channel.refuse(request, failure)
        else:
            channel.answer(request, result)
        finally:
            for fd in fds:
                os.close(fd)

    def _hello(self, body: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "version": __version__,
            "sessions": sorted(self._sessions),
            "ingress": self.ingress.address,
            "confinement": self._absent,
        }

    def _configure(self, body: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        world = self.world
        world.resolver.configure(body["name_servers"], body["names"])
        world.operator_allowed = tuple(body["allowed"])
        world.own_ports = frozenset(body["own_ports"])
        world.limits = EgressLimits(**body["limits"])
        if body["authority"] is not None and self._upstream is not None:
            world.inspect = self._inspector(body["authority"], self._upstream)
        return {}

    def _inspector(
        self, given: dict[str, Any], upstream: ssl.SSLContext
    ) -> Callable[[Egress, Flow, TrafficKind], Awaitable[None]]:
        if given == self._authority:
            assert self.world.inspect is not None
            return self.world.inspect
        from sandkeep.net import inspect, tls, tokens

        if given["trusted"]:
            upstream.load_verify_locations(cadata=given["trusted"])
        leaves = tls.Leaves(given["certificate"].encode(), given["key"].encode())
        signer = tokens.Signer(given["token_key"].encode(), given["issuer"])
        self._authority = given
        return inspect.Inspector(leaves, upstream, signer).serve

    def _register(self, body: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Take over a session's listeners. An earlier registration of it is replaced."""
        session, policy = str(body["session"]), policy_json.read(body["policy"])
        if len(fds) < 3:
            raise InvalidRequest("a registration needs listeners and a leash", field="fds")
        self._forget(session)
        *listeners, leash = [os.dup(fd) for fd in fds]
        egress = Egress(session, adopt(listeners), self.world)
        egress.secrets, egress.identity = body["secrets"], body["identity"]
        egress.set_policy(policy, _host_ports(body))
        self._sessions[session] = Registered(egress, Leash(leash, lambda: self._on_leash_end(egress)))
        egress.start()
        return {}

    def _on_leash_end(self, egress: Egress) -> None:
        """The supervisor is gone, and so is its session."""
        found = self._sessions.get(egress.session)
        if found is not None and found.egress is egress:
            self._forget(egress.session)
            self._leave_if_unused()

    def _forget(self, session: str) -> None:
        found = self._sessions.pop(session, None)
        if found is None:
            return
        found.leash.close()
        found.egress.close()
        self.ingress.forget(session)
        received, sent = found.new_bytes()
        before = self._ended_usage.get(session, (0, 0))
        self._ended_usage[session] = (before[0] + received, before[1] + sent)
        self._report_soon()

    def _find(self, body: dict[str, Any]) -> Registered:
        session = str(body["session"])
        found = self._sessions.get(session)
        if found is None:
            raise NotFound(f"session {session} is not registered", kind="session", name=session)
        return found

    def _update(self, body: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        egress, policy = self._find(body).egress, policy_json.read(body["policy"])
        granted = _host_ports(body)
        egress.secrets = body["secrets"]
        return {"cut": egress.set_policy(policy, granted)}

    def _unregister(self, body: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        self._forget(str(body["session"]))
        self._report()
        return {}

    def _egress_of(self, session: str) -> Egress | None:
        found = self._sessions.get(session)
        return found.egress if found is not None else None

    async def _get_sockets(self, session: str, family: int, count: int) -> list[int]:
        found = self._sessions.get(session)
        if found is None:
            raise NotFound(f"session {session} is not registered", kind="session", name=session)
        return await found.leash.sockets(family, count)

    def _routes(self, body: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        self._find(body)
        self.ingress.publish(
            str(body["session"]), {name: (int(port), token) for name, (port, token) in body["routes"].items()}
        )
        return {}

    def _ingress(self, body: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Listen for requests to sessions' ports on the socket that the engine sent; without one, stop."""
        if fds:
            self.ingress.listen(socket.socket(fileno=os.dup(fds[0])), body["domains"])
        else:
            self.ingress.close_listener()
        return {"address": self.ingress.address}

    def _stats(self, body: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        with_connections = {name: found.egress.connections for name, found in self._sessions.items()}
        return {"sessions": with_connections, "events": len(self.world.audit)}

    def _stop(self, body: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        self._loop.call_soon(self._over.set)
        return {}

    # --- reports -----------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Count bytes of long transfers while they last."""
        self._report()
        self._loop.call_later(_TICK_SECONDS, self._tick)

    def _report_soon(self) -> None:
        if self._reporting is None and self._channel is not None:
            self._reporting = self._loop.call_later(_REPORT_SECONDS, self._report)

    def _report(self) -> None:
        """Send the engine events and byte counts since the last report, unless it is not reading."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        channel = self._channel
        if channel is None:
            return
        if channel.congested:
            self._report_soon()
            return
        usage = {name: found.new_bytes() for name, found in self._sessions.items()}
        for name, (received, sent) in self._ended_usage.items():
            more = usage.get(name, (0, 0))
            usage[name] = (received + more[0], sent + more[1])
        self._ended_usage.clear()
        usage = {name: moved for name, moved in usage.items() if any(moved)}
        events, lost = self.world.audit.take(_BATCH)
        used = self.ingress.take_used()
        if events or usage or lost or used:
            report = {"events": events, "lost": lost, "usage": usage, "used": used}
            channel.send({"notice": "report", **report})
        if len(self.world.audit):
            self._report_soon()


def _host_ports(body: dict[str, Any]) -> HostPorts:
    """Return the ports of this machine that a session may reach, by the name that leads to them."""
    granted = body["host_ports"]
    return {str(name): frozenset(int(port) for port in ports) for name, ports in granted.items()}


_OPERATIONS: Final[dict[str, Callable[[Daemon, dict[str, Any], list[int]], dict[str, Any]]]] = {
    "hello": Daemon._hello,
    "configure": Daemon._configure,
    "register": Daemon._register,
    "update": Daemon._update,
    "unregister": Daemon._unregister,
    "routes": Daemon._routes,
    "ingress": Daemon._ingress,
    "stats": Daemon._stats,
    "stop": Daemon._stop,
}


def connect(data_dir: str) -> socket.socket | None:
    """Connect to the netd of a data directory; return ``None`` if none runs."""
    directory = os.open(data_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return sockets.connect_in(directory, SOCKET)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    finally:
        os.close(directory)


# --- starting ------------------------------------------------------------------------------------------


def main(data_dir: str) -> NoReturn:
    """Become netd of a data directory; write one line to standard output when ready or failed."""
    try:
        _start(data_dir)
    except (OSError, SandkeepError) as error:
        failure = error if isinstance(error, SandkeepError) else InternalError(f"netd cannot start: {error}")
        _report_start({"error": failure.to_json()})
        os._exit(1)
    os._exit(0)


def _report_start(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _start(data_dir: str) -> None:
    owner = os.geteuid()
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    directory = os.open(data_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    kept = [_hold_lock(directory)]
    _open_log(directory)
    control = sockets.listen_in(directory, SOCKET)
    control.setblocking(False)
    os.close(directory)
    upstream = _prepare_inspection()
    uid: int | None = None
    if owner == 0:
        uid, lock = confine.take_id()
        kept.append(lock)
    confine.enter_namespaces()
    if os.fork():
        os._exit(0)
    os.setsid()
    syscalls.scrub_command_line("sandkeep-netd", data_dir)
    absent = confine.give_up(uid)
    # Once more: the peer credentials that clients see are those of the process that called listen last.
    control.listen(128)
    _report_start({"ready": os.getpid(), "absent": absent})
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    asyncio.run(_serve(control, owner, absent, upstream))


async def _serve(
    control: socket.socket, owner: int, absent: dict[str, str], upstream: ssl.SSLContext | None
) -> None:
    await Daemon(control, owner=owner, absent=absent, upstream=upstream).run()


def _prepare_inspection() -> ssl.SSLContext | None:
    """Load everything rules need while there are files; ``None`` where it is not installed."""
    try:
        from sandkeep.net import inspect, tls
    except ImportError:
        return None
    del inspect
    # Some modules are imported by their first use only.
    policy.regex_available()
    tls.make_authority("rehearsal")
    "rehearsal".encode("idna")
    return tls.upstream_context()


def _hold_lock(directory: int) -> int:
    """Take the lock of the data directory; an earlier netd may still be ending."""
    import fcntl

    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory)
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _open_log(directory: int) -> None:
    log = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600, dir_fd=directory)
    if os.fstat(log).st_size > _LONGEST_LOG:
        os.ftruncate(log, 0)
    os.dup2(log, 2)
    os.close(log)
