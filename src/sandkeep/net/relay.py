"""Bytes between two sockets without passing through this process: ``splice`` driven by the event loop.

A pump moves one direction through a pipe, which it borrows only while bytes are under way: an idle connection
holds two sockets and nothing else. Bytes that one peer does not take stay in the pipe and then in the other
peer's socket, so memory does not grow if a peer stops reading.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Final

from sandkeep.net.turns import Account

_PIPE_BYTES: Final = 1 << 20
_MOST_SPARE: Final = 16
_ROUNDS: Final = 4
_HALF_OPEN_SECONDS: Final = 120.0
_FLAGS: Final = 0x1 | 0x2  # SPLICE_F_MOVE, SPLICE_F_NONBLOCK
_F_SETPIPE_SZ: Final = 1031
_PAST_URGENT: Final = 4096
"""Bytes: what an empty pipe takes at once, however small the kernel made it."""

PipeEnds = tuple[int, int]


class Pipes:
    """Empty pipes, shared by every pump of the process."""

    def __init__(self) -> None:
        self._spare: list[PipeEnds] = []

    def take(self) -> PipeEnds:
        if self._spare:
            return self._spare.pop()
        pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.fcntl(pipe[1], _F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            pass  # the kernel's share of pipe memory per user is used up; a small pipe works too
        return pipe

    def give(self, pipe: PipeEnds) -> None:
        if len(self._spare) < _MOST_SPARE:
            self._spare.append(pipe)
        else:
            self.discard(pipe)

    @staticmethod
    def discard(pipe: PipeEnds) -> None:
        os.close(pipe[0])
        os.close(pipe[1])

    def close(self) -> None:
        while self._spare:
            self.discard(self._spare.pop())


class _Pump:
    """One direction."""

    def __init__(self, relay: Relay, source: socket.socket, target: socket.socket) -> None:
        self._relay = relay
        self._source = source
        self._target = target
        self._pipe: PipeEnds | None = None
        self._pending = 0
        self.moved = 0
        self.started = False
        self.ended = False

    def start(self) -> None:
        self.started = True
        self._relay.loop.add_reader(self._source.fileno(), self._readable)

    def stop(self) -> None:
        """Stop watching the sockets; bytes in the pipe are lost."""
        self.ended = True
        if self.started:
            self._relay.loop.remove_reader(self._source.fileno())
            self._relay.loop.remove_writer(self._target.fileno())
        if self._pipe is not None:
            pipes = self._relay.pipes
            (pipes.discard if self._pending else pipes.give)(self._pipe)
            self._pipe = None

    def _readable(self) -> None:
        account = self._relay.account
        if account.must_wait():
            self._relay.loop.remove_reader(self._source.fileno())
            account.when_free(self._continue)
            return
        with account.charged():
            self._move()

    def _continue(self) -> None:
        """In turn, after others of the session."""
        if self.ended:
            return
        self._relay.loop.add_reader(self._source.fileno(), self._readable)
        with self._relay.account.charged():
            self._move()

    def _move(self) -> None:
        if self._pipe is None:
            try:
                self._pipe = self._relay.pipes.take()
            except OSError:
                self._relay.abort()
                return
        for number in range(_ROUNDS):
            try:
                count = self._fill(self._pipe[1], woken=number == 0)
            except BlockingIOError:
                break
            except OSError:
                self._relay.abort()
                return
            if count == 0:
                self._finish()
                return
            self._pending = count
            self.moved += count
            if not self._flush():
                return
        if self._pipe is not None:
            self._relay.pipes.give(self._pipe)
            self._pipe = None

    def _fill(self, pipe: int, *, woken: bool) -> int:
        """Move what the source has into the empty pipe; 0 at its end. ``woken``: it is known to have more."""
        try:
            count = os.splice(self._source.fileno(), pipe, _PIPE_BYTES, flags=_FLAGS)
        except BlockingIOError:
            if not woken:
                raise
            count = 0
        if count:
            return count
        # Nothing, or urgent data, which splice never gets past: it would wake us again and again.
        return os.write(pipe, data) if (data := self._source.recv(_PAST_URGENT)) else 0

    def _flush(self) -> bool:
        """Write out what the pipe holds; False when the target takes no more for now, or broke."""
        assert self._pipe is not None
        while self._pending:
            try:
                self._pending -= os.splice(self._pipe[0], self._target.fileno(), self._pending, flags=_FLAGS)
            except BlockingIOError:
                self._relay.loop.remove_reader(self._source.fileno())
                self._relay.loop.add_writer(self._target.fileno(), self._writable)
                return False
            except OSError:
                self._relay.abort()
                return False
        return True

    def _writable(self) -> None:
        with self._relay.account.charged():
            emptied = self._flush()
        if emptied:
            self._relay.loop.remove_writer(self._target.fileno())
            assert self._pipe is not None
            self._relay.pipes.give(self._pipe)
            self._pipe = None
            self._relay.loop.add_reader(self._source.fileno(), self._readable)

    def _finish(self) -> None:
        self.stop()
        try:
            self._target.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        self._relay.half_closed()


class Relay:
    """Two connected, non-blocking sockets, owned until ``ended`` is called.

    The near side's first bytes may be examined before they are relayed: until ``start_sending`` or
    ``release`` the caller may read from its socket, so the relay shuts it down but does not close it before.
    """

    def __init__(
        self,
        near: socket.socket,
        far: socket.socket,
        pipes: Pipes,
        account: Account,
        ended: Callable[[], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.account = account
        self.pipes = pipes
        self._near = near
        self._far = far
        self._ended = ended
        self._out = _Pump(self, near, far)
        self._in = _Pump(self, far, near)
        self._watch: asyncio.TimerHandle | None = None
        self._lent = True
        self.closed = False

    @property
    def sent(self) -> int:
        return self._out.moved

    @property
    def received(self) -> int:
        return self._in.moved

    def start_receiving(self) -> None:
        self._in.start()

    def start_sending(self) -> None:
        self._lent = False
        if self.closed:
            self.release()
        else:
            self._out.start()

    def release(self) -> None:
        """End the relay; the caller no longer uses the near socket."""
        self._lent = False
        self.abort()
        if self._near.fileno() >= 0:
            self._near.close()
            self._ended()

    def half_closed(self) -> None:
        if self._out.ended and self._in.ended:
            self._close()
        else:
            self._watch_other_half(-1)

    def _watch_other_half(self, before: int) -> None:
        """A side that never ends what the other has ended must not hold the connection for ever."""
        moved = self.sent + self.received
        if moved == before:
            self.abort()
        else:
            self._watch = self.loop.call_later(_HALF_OPEN_SECONDS, self._watch_other_half, moved)

    def abort(self) -> None:
        """End both sides at once; either sees a reset rather than a clean end."""
        if not self.closed:
            for sock in (self._near, self._far):
                reset_on_close(sock)
            self._close()

    def _close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._out.stop()
        self._in.stop()
        self._far.close()
        if self._lent:
            try:
                self._near.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is gone already
        else:
            self._near.close()
            self._ended()


def reset_on_close(sock: socket.socket) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def in_line(sock: socket.socket) -> None:
    """Keep urgent data in the stream, so that peeking at the stream shows what is relayed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)


def has_urgent(sock: socket.socket) -> bool:
    """Whether urgent data is waiting; peeking stops before it."""
    look = select.poll()
    look.register(sock.fileno(), select.POLLPRI)
    return any(found & select.POLLPRI for _, found in look.poll(0))


def keep_alive(sock: socket.socket) -> None:
    """Notice a peer that vanished, and do not hold back small writes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
