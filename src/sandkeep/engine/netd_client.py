"""The engine's client of netd: finds or starts the process, connects to it, and restarts it when it dies.

netd outlives the engine, so opening a data directory first looks for one that runs already. Before any other
request, a netd is introduced (``introduce``): it gets the settings and every running session.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from sandkeep.engine.services import Services
from sandkeep.errors import HostCannot, InvalidRequest, SandkeepError, TransportError, from_json
from sandkeep.net import netd
from sandkeep.net.channel import DescriptorChannel
from sandkeep.version import __version__

_ANSWER_SECONDS: Final = 15.0
_BACKOFF: Final = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)


class Greeting(NamedTuple):
    """The state a netd already has when the engine connects to it."""

    sessions: frozenset[str]
    ingress: list[Any] | None
    """Address and port it listens on for requests to ports of sandboxes."""


Introduce = Callable[[DescriptorChannel, Greeting], Awaitable[None]]
OnReport = Callable[[dict[str, Any]], None]


@contextmanager
def _closing_on_failure(channel: DescriptorChannel) -> Iterator[None]:
    """Close a connection if the block is interrupted or fails."""
    try:
        yield
    except BaseException:
        channel.close()
        raise


class NetdClient:
    """The engine's connection to netd. ``on_report`` gets the events and byte counts that netd sends."""

    def __init__(self, services: Services, introduce: Introduce, on_report: OnReport) -> None:
        self._services = services
        self._introduce = introduce
        self._on_report = on_report
        self._starting: asyncio.Task[DescriptorChannel] | None = None
        self._closing = False
        self.channel: DescriptorChannel | None = None
        """The connection to an introduced netd, if there is one now."""
        self.problem: str | None = None
        """Why there is no netd, if the latest attempt to start one failed."""
        self.pid: int | None = None

    async def ready(self) -> DescriptorChannel:
        """Return the connection to an introduced netd; start one if there is none."""
        if self.channel is not None:
            return self.channel
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start netd")
            self._starting.add_done_callback(self._started)
        return await asyncio.shield(self._starting)

    def _started(self, task: asyncio.Task[DescriptorChannel]) -> None:
        self._starting = None
        if not task.cancelled():
            task.exception()  # its waiters get the error; this keeps asyncio from logging it

    async def _start(self) -> DescriptorChannel:
        try:
            channel = await self._try_to_start()
        except Exception as error:
            self.problem = f"network: {error}"
            raise
        self.problem = None
        return channel

    async def _try_to_start(self) -> DescriptorChannel:
        failure: SandkeepError = TransportError("netd cannot be started")
        for pause in _BACKOFF:
            await asyncio.sleep(pause)
            try:
                found = await self._connect()
                if found is None:
                    await asyncio.get_running_loop().run_in_executor(None, self._launch)
                    found = await self._connect()
                if found is not None:
                    channel, greeting = found
                    with _closing_on_failure(channel):
                        await self._introduce(channel, greeting)
                    self.channel = channel
                    return channel
            except HostCannot:
                raise
            except ConnectionError as error:
                failure = TransportError(f"netd went away: {error}")
            except (InvalidRequest, OSError, ValueError, OverflowError) as error:
                # Not caused by a caller's request: the settings are wrong, or name something that is missing.
                raise HostCannot(
                    f"the network cannot be set up: {error}",
                    part="network",
                    why=str(error),
                    hint="look at 'network' in the server's settings.json",
                ) from error
            except SandkeepError as error:
                failure = error
        raise failure

    async def _connect(self) -> tuple[DescriptorChannel, Greeting] | None:
        """Connect to the running netd, if there is one of this version; stop one of another version."""
        sock = netd.connect(self._services.data_dir)
        if sock is None:
            return None
        channel = DescriptorChannel(sock, self._on_message, lambda: self._on_gone(channel))
        with _closing_on_failure(channel):
            hello = await self.ask(channel, "hello")
            if (hello["protocol"], hello["version"]) != (netd.PROTOCOL, __version__):
                await self.ask(channel, "stop")
                channel.close()
                return None
        self.pid = channel.peer()[0]
        if hello["confinement"]:
            self._services.log("netd is less confined than it could be", absent=hello["confinement"])
        return channel, Greeting(frozenset(hello["sessions"]), hello["ingress"])

    def _launch(self) -> None:
        script = os.path.join(os.path.dirname(netd.__file__), "start_netd.py")
        # Isolated from the environment, but with this process's search path, which may come from there.
        argv = [sys.executable, "-I", script, self._services.data_dir, ":".join(sys.path)]
        with subprocess.Popen(argv, env={}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as launcher:
            assert launcher.stdout is not None
            line = launcher.stdout.readline()
        message: dict[str, Any] = json.loads(line) if line else {}
        if "error" in message:
            raise from_json(message["error"])
        if "ready" not in message:
            raise HostCannot(
                "netd ended while starting",
                part="netd",
                why="see netd.log in the data directory",
                hint="run 'sandkeep doctor'",
            )

    async def ask(
        self, channel: DescriptorChannel, op: str, fds: list[int] | None = None, **body: Any
    ) -> dict[str, Any]:
        """Send a request and return netd's response."""
        try:
            answer, received = await asyncio.wait_for(channel.request(op, fds, **body), _ANSWER_SECONDS)
        except TimeoutError:
            channel.close()
            raise TransportError("netd does not answer") from None
        for fd in received:
            os.close(fd)
        return answer

    def _on_message(self, body: dict[str, Any], fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if body.get("notice") == "report":
            self._on_report(body)

    def _on_gone(self, channel: DescriptorChannel) -> None:
        if self.channel is not channel:
            return
        self.channel = None
        self.pid = None
        if not self._closing:
            self._services.log("netd ended; starting another")
            self._services.spawn(self.run(), "restart netd")

    async def run(self) -> None:
        """Start netd, so that the first session does not wait and running ones have their network."""
        await self.ready()

    async def close(self) -> None:
        """Close the connection. netd keeps running for as long as there are sessions."""
        self._closing = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self.channel is not None:
            self.channel.close()
