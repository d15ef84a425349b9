"""One client of the control socket: requests in, responses out, and lending the socket to a thread."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from typing import Any, Final

from sandkeep.errors import InternalError, InvalidRequest, SandkeepError
from sandkeep.linux import sockets
from sandkeep.shared import protocol
from sandkeep.supervisor.reactor import Reactor

_OUTGOING_LIMIT: Final = 8 << 20
"""Most bytes of responses kept for a client that does not read; beyond, the connection is closed."""

Dispatch = Callable[["Connection", dict[str, Any], bytes], None]


class Connection:
    def __init__(self, sock: socket.socket, reactor: Reactor, dispatch: Dispatch) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reactor = reactor
        self._dispatch = dispatch
        self._decoder = protocol.FrameDecoder()
        self._outgoing = bytearray()
        self._lent = False
        self.closed = False
        reactor.add(sock.fileno(), self._on_event)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if not self._lent:
                self._reactor.remove(self._sock.fileno())
                self._sock.close()

    # --- answers -----------------------------------------------------------------------------------------

    def answer(self, request: Any, result: dict[str, Any], blob: bytes = b"") -> None:
        self._send(protocol.encode({"id": request, "ok": result}, blob))

    def refuse(self, request: Any, error: SandkeepError) -> None:
        self._send(protocol.encode({"id": request, "error": error.to_json()}))

    def hand_over(self, request: Any, result: dict[str, Any], fds: list[int]) -> None:
        """Respond with descriptors, which travel with the first byte of the response."""
        if self.closed:
            return
        self._flush()
        if self._outgoing or self._lent:
            raise InternalError("descriptors can only be sent while no earlier response is queued")
        if not self.closed:
            sockets.send(self._sock, protocol.encode({"id": request, "ok": result, "fds": len(fds)}), fds)

    def _send(self, data: bytes) -> None:
        if self.closed:
            return
        self._outgoing += data
        if self._lent:
            return
        self._flush()
        if len(self._outgoing) > _OUTGOING_LIMIT:
            self.close()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                sent = self._sock.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        wanted = select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0)
        self._reactor.change(self._sock.fileno(), wanted)

    # --- requests ----------------------------------------------------------------------------------------

    def _on_event(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if events & ~select.EPOLLOUT and not self.closed:
            try:
                data = self._sock.recv(1 << 20)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            frames = self._decoder.feed(data)
        except protocol.ProtocolError:
            self.close()
            return
        for index, (body, blob) in enumerate(frames):
            if body is None or self.closed:
                continue  # data frames of an operation that was refused before it read them all
            self._serve(body, blob)
            if self._lent:
                # All bytes that follow a streaming request belong to that stream.
                rest = b"".join(protocol.encode(*frame) for frame in frames[index + 1 :])
                self._lent_rest = rest + self._decoder.take_rest()
                return

    def _serve(self, body: dict[str, Any], blob: bytes) -> None:
        request = body.get("id")
        try:
            if request is None:
                raise InvalidRequest("a request needs an id", field="id")
            self._dispatch(self, body, blob)
        except SandkeepError as error:
            self.refuse(request, error)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            what = f"{type(error).__name__}: {error}"
            self.refuse(request, InvalidRequest(f"malformed request: {what}", field=str(error)))
        except OSError as error:
            self.refuse(request, InternalError(f"{body.get('op')}: {error}"))

    # --- lending the socket to a thread ------------------------------------------------------------------

    def lend(self, work: Callable[[LentSocket], None]) -> None:
        """Lend the socket to a thread until ``work`` returns; then the loop has it back, or it is closed."""
        self._lent = True
        self._lent_rest = b""
        self._reactor.remove(self._sock.fileno())
        # Posted, so that _take has first put aside the bytes that arrived after the request.
        self._reactor.post(lambda: self._reactor.thread(self._lent_out, work))

    def _lent_out(self, work: Callable[[LentSocket], None]) -> None:
        stream = LentSocket(self._sock, self._lent_rest)
        try:
            if self._outgoing:
                self._sock.setblocking(True)
                self._sock.sendall(self._outgoing)
                self._outgoing.clear()
            work(stream)
        except (OSError, protocol.ProtocolError):
            stream.broken = True
        self._reactor.post(lambda: self._take_back(stream))

    def _take_back(self, stream: LentSocket) -> None:
        self._lent = False
        if stream.broken or self.closed:
            self.closed = True
            self._sock.close()
            return
        self._sock.setblocking(False)
        self._reactor.add(self._sock.fileno(), self._on_event)
        if self._outgoing:
            self._flush()
        if rest := stream.rest():
            self._take(rest)


class LentSocket:
    """Blocking frames on a lent socket, from which a file operation reads its data and to which it writes."""

    def __init__(self, sock: socket.socket, rest: bytes) -> None:
        sock.setblocking(True)
        # A client that stalls must not block a thread forever.
        sock.settimeout(300)
        self.sock = sock
        self.broken = False
        self._buffer = bytearray(rest)
        self._left = 0
        """Bytes of the current data frame still to be read."""
        self._ended = False
        self._last = False
        """The current data frame is the last one."""

    def rest(self) -> bytes:
        return bytes(self._buffer)

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = self.sock.recv(max(size - len(self._buffer), 1 << 16))
            if not data:
                raise ConnectionResetError("client went away")
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes of the client's data, ``b""`` at its end."""
        if self._ended:
            return b""
        while self._left == 0:
            if self._last:
                self._ended = True
                return b""
            json_length, blob_length = protocol.decode_header(self._exactly(protocol.HEADER.size))
            if json_length:
                body = protocol.decode_json(self._exactly(json_length))
                self._exactly(blob_length)
                if body.get("end"):
                    self._ended = True
                    return b""
                raise protocol.ProtocolError("expected data")
            self._left = blob_length
        if self._buffer:
            data = bytes(self._buffer[: min(size, self._left)])
            del self._buffer[: len(data)]
        else:
            data = self.sock.recv(min(size, self._left))
            if not data:
                raise ConnectionResetError("client went away")
        self._left -= len(data)
        return data

    def take_socket(self, request: Any, facts: dict[str, Any]) -> tuple[socket.socket, dict[str, Any]]:
        """Ask the client to send its connection, wait for the descriptor, and return it with its message.

        The rest of that frame is then the only data to ``read``. If the descriptor does not come, this
        connection cannot be used any more: a late one could be taken for the reply to a later request.
        """
        if self._buffer:
            raise protocol.ProtocolError("the client sent data before the supervisor asked for it")
        try:
            self.sock.sendall(protocol.encode({"id": request, "direct": facts}))
            data, fds = sockets.receive(self.sock, protocol.HEADER.size + (1 << 16))
        except OSError as error:
            raise protocol.ProtocolError(f"the client sent no descriptor: {error}") from error
        try:
            if not data:
                raise protocol.ProtocolError("the client sent no descriptor")
            self._buffer += data
            json_length, self._left = protocol.decode_header(self._exactly(protocol.HEADER.size))
            body = protocol.decode_json(self._exactly(json_length))
            if len(fds) != 1:
                raise protocol.ProtocolError(f"expected one descriptor, not {len(fds)}")
            self._last = True
            return socket.socket(fileno=fds.pop()), body
        finally:
            for fd in fds:
                os.close(fd)

    def skip_input(self) -> None:
        """Discard the rest of the client's data, so that the client reads the response instead of a reset."""
        while self.read(1 << 20):
            pass

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            chunk, view = view[: protocol.MAX_BLOB], view[protocol.MAX_BLOB :]
            self.sock.sendall(protocol.HEADER.pack(0, len(chunk)))
            self.sock.sendall(chunk)

    def answer(self, request: Any, result: dict[str, Any]) -> None:
        self.sock.sendall(protocol.encode({"id": request, "ok": result}))

    def refuse(self, request: Any, error: SandkeepError) -> None:
        self.sock.sendall(protocol.encode({"id": request, "error": error.to_json()}))
