"""Running the server on a data directory.

A lock allows one server per data directory; the kernel releases it however the server ends. The server always
listens on ``server.sock`` there, and on TCP if configured. ``server.json`` says where, while it runs.
Stopping it leaves every session running; the next server finds them.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any, Final

from sandkeep.embedded import LOCK, READY, SOCKET
from sandkeep.engine.engine import Engine
from sandkeep.engine.reserve import Reserve
from sandkeep.engine.settings import Settings
from sandkeep.errors import Conflict, HostCannot, InternalError, SandkeepError, path_error
from sandkeep.server.app import Application, Config, create_app
from sandkeep.server.auth import Auth, load_key
from sandkeep.server.listen import Listener, Protocol
from sandkeep.server.logs import LogForwarder, make_log
from sandkeep.version import __version__

SERVER_FILE: Final = "server.json"
GRACE_SECONDS: Final = 10
"""Longest wait for open requests when the server stops."""
_KEEP_ALIVE_SECONDS: Final = 75
_FREED_SECONDS: Final = 5.0
_IDLE_LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    host: str | None = None
    """Also listen on TCP: at this address, and the port below (0: any)."""
    port: int | None = None
    log_format: str = "text"
    log_level: str = "info"
    idle_exit: float | None = None
    """Exit after so many seconds without sessions and connections."""
    embedded: bool = False
    public_url: str | None = None
    ready_fd: int | None = None
    """Gets "ready" once the server accepts requests, or the error as JSON if it cannot start."""
    quiet: bool = False
    adopt: bool = False
    """Accept a data directory whose store does not know the layers and sessions in it."""


def run(data_dir: str, options: Options, *, settings: Settings | None = None) -> int:
    """Serve until a signal, or until idle. Return the exit status."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(ServerProcess(data_dir, options, settings).run())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ServerProcess(data_dir, options, settings).run())


def tell_failure(ready_fd: int | None, error: Exception) -> None:
    """Report to the process that started this server why it cannot run."""
    if ready_fd is None:
        return
    if not isinstance(error, SandkeepError):
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error, OSError) and error.filename else ""
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        error = InternalError(f"{where}{why}")
    with suppress(OSError):
        os.write(ready_fd, json.dumps({"error": error.to_json()}).encode() + b"\n")


def take_lock(data_dir: str) -> int:
    """Take the lock of the directory. Raises `Conflict` if another server holds it."""
    path = os.path.join(data_dir, LOCK)
    try:
        os.makedirs(data_dir, mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise path_error(error, "lock", path) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise Conflict(
            f"another server is running on {data_dir}" + (f" (process {holder})" if holder else ""),
            hint="stop that server, or choose another --data-dir",
        ) from None
    _write_owner(fd)
    return fd


def _write_owner(lock: int) -> None:
    """Write our process id into the lock file, for people. Overwriting needs no free space on most disks."""
    line = f"{os.getpid()}\n".encode()
    try:
        os.pwrite(lock, line, 0)
        os.ftruncate(lock, len(line))
    except OSError:
        pass


def bind_unix(data_dir: str) -> socket.socket:
    """Return the socket to listen on, replacing one that an earlier server left. Needs the lock."""
    directory = os.open(data_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(FileNotFoundError):
            os.unlink(SOCKET, dir_fd=directory)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            # Bind through the directory's descriptor: a socket address holds at most 107 bytes.
            _bind(sock, f"/proc/self/fd/{directory}/{SOCKET}", Reserve(data_dir))
        except OSError as error:
            sock.close()
            raise path_error(error, "bind", os.path.join(data_dir, SOCKET)) from error
        finally:
            os.umask(mask)
        sock.setblocking(False)
        return sock
    finally:
        os.close(directory)


def _bind(sock: socket.socket, path: str, reserve: Reserve) -> None:
    """Bind; on a full disk with the reserve's space, or with space a filesystem frees late, as xfs does."""
    deadline = time.monotonic() + _FREED_SECONDS
    while True:
        try:
            return sock.bind(path)
        except OSError as error:
            if error.errno != errno.ENOSPC or time.monotonic() > deadline:
                raise
        if not reserve.spend():
            time.sleep(0.05)


def bind_tcp(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise HostCannot(
            f"cannot listen on {host}:{port}: {error.strerror or error}", part="tcp", why=str(error)
        ) from error
    sock.listen(1024)
    sock.setblocking(False)
    return sock


class ServerProcess:
    def __init__(self, data_dir: str, options: Options, settings: Settings | None) -> None:
        self._data_dir = data_dir
        self._options = options
        self._settings = settings
        self._log: Callable[..., None] = make_log(options.log_format, level=options.log_level)
        self._listeners: list[Listener] = []
        self._stop = asyncio.Event()
        self._why = ""
        self._ready_fd = options.ready_fd
        self._lock = -1

    async def run(self) -> int:
        try:
            return await self._run()
        except Exception as error:
            tell_failure(self._ready_fd, error)
            raise

    async def _run(self) -> int:
        lock = take_lock(self._data_dir)
        self._lock = lock
        self._free_reserve()
        _send_library_logs_to(self._log)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            with ExitStack() as held:
                # Before the engine refills the reserve. No client can connect yet.
                unix = held.enter_context(bind_unix(self._data_dir))
                tcp = self._bind_tcp(held)
                settings = _with_own_port(self._settings or Settings(), tcp)
                engine = await Engine.open(
                    self._data_dir, settings=settings, log=self._log, adopt=self._options.adopt
                )
                try:
                    await self._serve(engine, unix, tcp)
                finally:
                    await engine.close()
        finally:
            # If the directory was removed and made anew, these files are another server's.
            for name in (SERVER_FILE, SOCKET) if self._has_directory() else ():
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._data_dir, name))
            os.close(lock)
        self._log("stopped", why=self._why)
        return 0

    def _has_directory(self) -> bool:
        """Whether the data directory still has our lock file, and with it our other files."""
        try:
            named = os.stat(os.path.join(self._data_dir, LOCK))
        except OSError:
            return False
        return os.path.samestat(named, os.fstat(self._lock))

    def _free_reserve(self) -> None:
        """Free the reserve on a full disk: without a server nothing could be deleted."""
        reserve = Reserve(self._data_dir)
        if reserve.scarce():
            given = reserve.spend()
            self._log("the disk is full", level="warning", path=self._data_dir, reserve_given_up=given)

    def _bind_tcp(self, held: ExitStack) -> socket.socket | None:
        """Bind before the engine opens: running sessions must never reach our port."""
        options = self._options
        if options.host is None and options.port is None:
            return None
        return held.enter_context(bind_tcp(options.host or "127.0.0.1", options.port or 0))

    async def _serve(self, engine: Engine, unix: socket.socket, tcp: socket.socket | None) -> None:
        options = self._options
        unix.listen(1024)
        url = None if tcp is None else _url(tcp)
        app = self._app(engine)
        serving = [self._listen(app, sock) for sock in (unix, tcp) if sock is not None]
        idle: asyncio.Task[None] | None = None
        try:
            await self._started(serving)
            self._warn_of_local_ports(engine, tcp)
            self._announce(url)
            if options.idle_exit is not None:
                idle = asyncio.create_task(self._exit_when_idle(engine, options.idle_exit), name="idle")
            await self._stop.wait()
        finally:
            if idle is not None:
                idle.cancel()
            self._log("stopping", why=self._why)
            for listener in self._listeners:
                listener.should_exit = True
            await app.close_streams()
            await asyncio.gather(*serving, return_exceptions=True)

    def _app(self, engine: Engine) -> Application:
        config = Config(public_url=self._options.public_url, embedded=self._options.embedded)
        app = create_app(engine, Auth(engine.store, load_key(self._data_dir)), config, log=self._log)
        if self._options.embedded:
            app.retire = lambda: self._end("retired")
        return app

    def _listen(self, app: Application, sock: socket.socket) -> asyncio.Task[None]:
        import uvicorn

        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="websockets-sansio",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        listener = Listener(config)
        self._listeners.append(listener)
        return asyncio.create_task(listener.serve(sockets=[sock]), name=f"listen {sock.family.name}")

    async def _started(self, serving: list[asyncio.Task[None]]) -> None:
        while not all(listener.started for listener in self._listeners):
            done = [task for task in serving if task.done()]
            for task in done:
                task.result()
            await asyncio.sleep(0.001)

    def _warn_of_local_ports(self, engine: Engine, tcp: socket.socket | None) -> None:
        """Log a warning if clients on other machines get loopback URLs of ports."""
        network = engine.settings.network
        remote = self._options.public_url is not None or (
            tcp is not None and not _is_loopback(tcp.getsockname()[0])
        )
        if remote and network.ingress_domain is None and _is_loopback(network.ingress_address):
            self._log(
                "the URLs of sandbox ports work on this machine only",
                level="warning",
                hint="set network.ingress_domain in settings.json",
            )

    def _announce(self, url: str | None) -> None:
        path = os.path.join(self._data_dir, SOCKET)
        where: dict[str, Any] = {
            "pid": os.getpid(),
            "version": __version__,
            "unix": path,
            "url": url,
        }
        try:
            self._write_where(json.dumps(where).encode())
        except OSError as error:
            # The disk is full. Clients find the socket without the file.
            self._log(
                "cannot write", level="warning", path=os.path.join(self._data_dir, SERVER_FILE), error=error
            )
        self._log("ready", unix=path, url=url or "none", pid=os.getpid())
        if not self._options.quiet:
            with suppress(OSError):  # the disk of our output may be full too
                print(_how_to_connect(self._data_dir, path, url), flush=True)
        self._report_start(READY)
        self._hang_up()

    def _report_start(self, outcome: bytes) -> None:
        """Report the outcome to the process that started the server."""
        if self._ready_fd is not None:
            with suppress(BrokenPipeError):
                os.write(self._ready_fd, outcome)

    def _hang_up(self) -> None:
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None

    def _write_where(self, content: bytes) -> None:
        final = os.path.join(self._data_dir, SERVER_FILE)
        draft = f"{final}.new"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), draft)
        except OSError:
            os.unlink(draft)
            raise
        finally:
            os.close(fd)
        os.rename(draft, final)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            for listener in self._listeners:
                listener.force_exit = True
        self._end(signal.Signals(number).name)

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._stop.set()

    async def _exit_when_idle(self, engine: Engine, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            await asyncio.sleep(min(_IDLE_LOOK_SECONDS, seconds))
            if not self._has_directory():
                return self._end("the data directory was removed")
            connected = any(listener.server_state.connections for listener in self._listeners)
            if connected or engine.store.sessions.active_on_host(engine.driver.host):
                since = loop.time()
            elif loop.time() - since >= seconds:
                self._end("idle")


def _with_own_port(settings: Settings, tcp: socket.socket | None) -> Settings:
    """Return settings that keep sessions away from the port we listen on."""
    if tcp is None:
        return settings
    own_ports = (*settings.network.own_ports, tcp.getsockname()[1])
    return replace(settings, network=replace(settings.network, own_ports=own_ports))


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _how_to_connect(data_dir: str, path: str, url: str | None) -> str:
    lines = [
        f"sandkeep {__version__} is ready",
        f"  unix socket  {path} (for this user and root, without a token)",
    ]
    if url is not None:
        lines += [
            f"  http         {url} (with a token; official clients: {url}/api)",
            f"  get a token  sandkeep token create --data-dir {data_dir} --team TEAM --project PROJECT --jwt",
        ]
    return "\n".join(lines)


def _send_library_logs_to(log: Callable[..., None]) -> None:
    for name in ("uvicorn.error", "uvicorn.asgi", "asyncio", "websockets"):
        logger = logging.getLogger(name)
        logger.handlers = [LogForwarder(log)]
        logger.setLevel(logging.WARNING)
        logger.propagate = False
