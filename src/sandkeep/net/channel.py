"""netd's connections to the engine and to supervisors: JSON frames and descriptors over a unix socket.

The engine and netd use it on their event loops. A request ``{"id", "op", …}`` gets one response ``{"id",
"ok"}`` or ``{"id", "error"}``; a message without an id is a notice. Descriptors travel with the first byte of
the frame that says ``fds``, their number, so the receiver can assign them to frames however the bytes are
split.

It has the frames of `sandkeep.shared.protocol`, and not the channel of `sandkeep.host.channel`: an asyncio
transport loses descriptors, and here both ends send requests.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from sandkeep.errors import SandkeepError, TransportError, from_json
from sandkeep.shared import protocol

_MOST_FDS: Final = 64
_MOST_WAITING: Final = 32 << 20

MessageHandler = Callable[[dict[str, Any], list[int]], None]


class DescriptorChannel:
    """One end of a connection. ``handle`` gets every message that is not an answer to an own request."""

    def __init__(self, sock: socket.socket, handle: MessageHandler, closed: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._handle = handle
        self._closed = closed
        self._decoder = protocol.FrameDecoder()
        self._fds: deque[int] = deque()
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._outgoing_bytes = 0
        self._writing = False
        self._answers: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._next = 0
        self.open = True
        self._loop.add_reader(sock.fileno(), self._readable)

    def peer(self) -> tuple[int, int, int]:
        """Return process, user and group of the peer."""
        data = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, gid = struct.unpack("iII", data)
        return pid, uid, gid

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        for _, fds in self._outgoing:
            for fd in fds:
                os.close(fd)
        for future in self._answers.values():
            if not future.done():
                future.set_exception(TransportError("the connection was closed before the answer"))
        self._answers.clear()
        self._closed()

    # --- out ---------------------------------------------------------------------------------------------

    def send(self, body: dict[str, Any], fds: list[int] | None = None) -> None:
        """Queue a message. Descriptors are duplicated: the caller keeps its own."""
        if not self.open:
            return
        copies = [os.dup(fd) for fd in fds or ()]
        data = protocol.encode({**body, "fds": len(copies)} if copies else body)
        self._outgoing.append((data, copies))
        self._outgoing_bytes += len(data)
        if self._outgoing_bytes > _MOST_WAITING:
            self.close()
        elif not self._writing:
            self._writable()

    @property
    def congested(self) -> bool:
        return self._outgoing_bytes > 1 << 20

    async def request(
        self, op: str, fds: list[int] | None = None, **body: Any
    ) -> tuple[dict[str, Any], list[int]]:
        if not self.open:
            raise TransportError("the connection is closed")
        self._next += 1
        future: asyncio.Future[tuple[dict[str, Any], list[int]]] = self._loop.create_future()
        self._answers[self._next] = future
        self.send({"id": self._next, "op": op, **body}, fds)
        return await future

    def answer(self, request: Any, result: dict[str, Any], fds: list[int] | None = None) -> None:
        self.send({"id": request, "ok": result}, fds)

    def refuse(self, request: Any, error: SandkeepError) -> None:
        self.send({"id": request, "error": error.to_json()})

    def _writable(self) -> None:
        try:
            while self._outgoing:
                data, fds = self._outgoing[0]
                rights = struct.pack(f"{len(fds)}i", *fds)
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
                sent = self._sock.sendmsg([data], ancillary)
                for fd in fds:
                    os.close(fd)
                self._outgoing_bytes -= sent
                if sent < len(data):
                    self._outgoing[0] = (data[sent:], [])
                else:
                    self._outgoing.popleft()
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock.fileno(), self._writable)
            return
        except OSError:
            self.close()
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())

    # --- in ----------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            space = socket.CMSG_SPACE(4 * _MOST_FDS)
            data, ancillary, flags, _ = self._sock.recvmsg(1 << 18, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                count = len(payload) // 4
                self._fds.extend(struct.unpack(f"{count}i", payload[: count * 4]))
        if not data or flags & socket.MSG_CTRUNC:
            self.close()
            return
        try:
            frames = self._decoder.feed(data)
        except protocol.ProtocolError:
            self.close()
            return
        for body, _ in frames:
            if body is not None and self.open:
                self._take(body)

    def _take(self, body: dict[str, Any]) -> None:
        count = body.get("fds", 0)
        if not isinstance(count, int) or count > len(self._fds):
            self.close()
            return
        fds = [self._fds.popleft() for _ in range(count)]
        if "op" in body or "id" not in body:
            self._handle(body, fds)
            return
        future = self._answers.pop(body["id"], None)
        if future is None or future.done():
            for fd in fds:
                os.close(fd)
        elif "error" in body:
            for fd in fds:
                os.close(fd)
            future.set_exception(from_json(body["error"]))
        else:
            future.set_result((body["ok"], fds))
