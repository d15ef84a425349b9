"""Running the server on a data directory.

One server per data directory: a lock says so, and is let go by the kernel however the server ends. It always
listens on ``server.sock`` there; on TCP when asked. ``server.json`` says where, while it runs. Stopping it
leaves every session running; the next server finds them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import sandkeep
from sandkeep.engine.engine import Engine
from sandkeep.engine.settings import Settings
from sandkeep.errors import Conflict, HostCannot
from sandkeep.server.app import App, Config, create_app
from sandkeep.server.auth import Auth, load_key
from sandkeep.server.embedded import LOCK, SOCKET
from sandkeep.server.listen import Listener, Protocol
from sandkeep.server.logs import Forward, make_log

WHERE: Final = "server.json"
GRACE_SECONDS: Final = 10
"""For requests under way when the server stops."""
_KEEP_ALIVE_SECONDS: Final = 75
_IDLE_LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    host: str | None = None
    """Listen on TCP too: at this address, and below at this port (0: any)."""
    port: int | None = None
    log_format: str = "text"
    log_level: str = "info"
    idle_exit: float | None = None
    """End after so many seconds without sessions and connections."""
    embedded: bool = False
    public_url: str | None = None
    ready_fd: int | None = None
    """Told "ready" when requests are answered."""
    quiet: bool = False


def run(data_dir: str, options: Options, *, settings: Settings | None = None) -> int:
    """Serve until a signal, or until idle. Returns the exit status."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_Running(data_dir, options, settings).run())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Running(data_dir, options, settings).run())


def take_lock(data_dir: str) -> int:
    """The right to serve the directory. Raises `Conflict` when another server has it."""
    os.makedirs(data_dir, mode=0o700, exist_ok=True)
    path = os.path.join(data_dir, LOCK)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise Conflict(
            f"another server is running on {data_dir}" + (f" (process {holder})" if holder else ""),
            hint="stop that one, or choose another --data-dir",
        ) from None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def bind_unix(data_dir: str) -> socket.socket:
    """The listening socket, whatever an earlier server left there. Needs the lock."""
    directory = os.open(data_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(FileNotFoundError):
            os.unlink(SOCKET, dir_fd=directory)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            # Through the directory's descriptor: socket addresses have room for 107 bytes only.
            sock.bind(f"/proc/self/fd/{directory}/{SOCKET}")
        finally:
            os.umask(mask)
        sock.listen(1024)
        sock.setblocking(False)
        return sock
    finally:
        os.close(directory)


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


class _Running:
    def __init__(self, data_dir: str, options: Options, settings: Settings | None) -> None:
        self._data_dir = data_dir
        self._options = options
        self._settings = settings
        self._log: Callable[..., None] = make_log(options.log_format, level=options.log_level)
        self._listeners: list[Listener] = []
        self._stop = asyncio.Event()
        self._why = ""

    async def run(self) -> int:
        lock = take_lock(self._data_dir)
        _send_library_logs_to(self._log)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            with ExitStack() as held:
                tcp = self._bind_tcp(held)
                settings = _with_own_port(self._settings or Settings(), tcp)
                engine = await Engine.open(self._data_dir, settings=settings, log=self._log)
                try:
                    await self._serve(engine, tcp)
                finally:
                    await engine.close()
        finally:
            for name in (WHERE, SOCKET):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._data_dir, name))
            os.close(lock)
        self._log("stopped", why=self._why)
        return 0

    def _bind_tcp(self, held: ExitStack) -> socket.socket | None:
        """Before the engine opens: sessions that run already must not reach our port for a moment."""
        options = self._options
        if options.host is None and options.port is None:
            return None
        return held.enter_context(bind_tcp(options.host or "127.0.0.1", options.port or 0))

    async def _serve(self, engine: Engine, tcp: socket.socket | None) -> None:
        options = self._options
        unix = bind_unix(self._data_dir)
        url = None if tcp is None else _url(tcp)
        app = self._app(engine)
        serving = [self._listen(app, sock) for sock in (unix, tcp) if sock is not None]
        idle: asyncio.Task[None] | None = None
        try:
            await self._started(serving)
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

    def _app(self, engine: Engine) -> App:
        config = Config(public_url=self._options.public_url, embedded=self._options.embedded)
        app = create_app(engine, Auth(engine.store, load_key(self._data_dir)), config, log=self._log)
        if self._options.embedded:
            app.retire = lambda: self._end("retired")
        return app

    def _listen(self, app: App, sock: socket.socket) -> asyncio.Task[None]:
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

    def _announce(self, url: str | None) -> None:
        path = os.path.join(self._data_dir, SOCKET)
        where: dict[str, Any] = {
            "pid": os.getpid(),
            "version": sandkeep.__version__,
            "unix": path,
            "url": url,
        }
        draft = os.path.join(self._data_dir, f"{WHERE}.new")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            json.dump(where, out)
        os.rename(draft, os.path.join(self._data_dir, WHERE))
        self._log("ready", unix=path, url=url or "none", pid=os.getpid())
        if not self._options.quiet:
            print(_how_to_connect(self._data_dir, path, url), flush=True)
        if self._options.ready_fd is not None:
            os.write(self._options.ready_fd, b"ready\n")
            os.close(self._options.ready_fd)

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
            connected = any(listener.server_state.connections for listener in self._listeners)
            if connected or engine.store.sessions.active_on_host(engine.driver.host):
                since = loop.time()
            elif loop.time() - since >= seconds:
                self._end("idle")


def _with_own_port(settings: Settings, tcp: socket.socket | None) -> Settings:
    """Out of every session's reach: the port we listen on ourselves."""
    if tcp is None:
        return settings
    own_ports = (*settings.network.own_ports, tcp.getsockname()[1])
    return replace(settings, network=replace(settings.network, own_ports=own_ports))


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _how_to_connect(data_dir: str, path: str, url: str | None) -> str:
    lines = [
        f"sandkeep {sandkeep.__version__} is ready",
        f"  unix socket  {path} (for you and root, no token)",
    ]
    if url is not None:
        lines += [
            f"  http         {url} (token needed; official clients: {url}/api)",
            f"  get a token  sandkeep token create --data-dir {data_dir} --team TEAM --project PROJECT --jwt",
        ]
    return "\n".join(lines)


def _send_library_logs_to(log: Callable[..., None]) -> None:
    for name in ("uvicorn.error", "uvicorn.asgi", "asyncio", "websockets"):
        logger = logging.getLogger(name)
        logger.handlers = [Forward(log)]
        logger.setLevel(logging.WARNING)
        logger.propagate = False
