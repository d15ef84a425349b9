"""The event loop: descriptors, timers, and callbacks posted by threads. One per supervisor, no policy."""

from __future__ import annotations

import heapq
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

Callback = Callable[[], None]

_LONGEST_WAIT = 86_400.0
"""Longest wait: the kernel takes milliseconds in 31 bits. A later timer takes several waits."""


class Timer:
    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callback) -> None:
        self.when = when
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class Reactor:
    def __init__(self) -> None:
        self._poll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._handlers: dict[int, tuple[Callable[[int], None], int]] = {}
        self._timers: list[Timer] = []
        self._posted: deque[Callback] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.add(self._bell, self._ring)
        self.running = True

    def add(self, fd: int, handler: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        self._poll.register(fd, events)
        self._handlers[fd] = (handler, events)

    def change(self, fd: int, events: int) -> None:
        handler, current = self._handlers[fd]
        if current != events:
            self._poll.modify(fd, events)
            self._handlers[fd] = (handler, events)

    def remove(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def later(self, seconds: float, callback: Callback) -> Timer:
        timer = Timer(time.monotonic() + max(seconds, 0), callback)
        heapq.heappush(self._timers, timer)
        return timer

    def post(self, callback: Callback) -> None:
        """Run a callback on the loop's thread. Any thread may call this."""
        self._posted.append(callback)
        os.eventfd_write(self._bell, 1)

    def thread(self, work: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()

    def run(self) -> None:
        while self.running:
            for fd, events in self._poll.poll(self._patience()):
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler[0](events)
            self._fire()

    def _patience(self) -> float:
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1
        return min(max(self._timers[0].when - time.monotonic(), 0), _LONGEST_WAIT)

    def _fire(self) -> None:
        now = time.monotonic()
        while self._timers and (self._timers[0].callback is None or self._timers[0].when <= now):
            callback = heapq.heappop(self._timers).callback
            if callback is not None:
                callback()

    def _ring(self, _: int) -> None:
        os.eventfd_read(self._bell)
        while self._posted:
            self._posted.popleft()()
