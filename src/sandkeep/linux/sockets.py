"""Messages with file descriptors over unix sockets, close-on-exec from the start."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

# socket.MSG_CMSG_CLOEXEC exists on Linux builds only; typeshed knows it there.
_CLOEXEC: Final = socket.MSG_CMSG_CLOEXEC
_MAX_FDS: Final = 64


def send(sock: socket.socket, data: bytes, fds: list[int] | None = None) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    sock.sendmsg([data], ancillary)


def receive(sock: socket.socket, size: int = 1 << 18) -> tuple[bytes, list[int]]:
    """Receive one message and its descriptors. If it is truncated, close the descriptors and raise."""
    data, ancillary, flags, _ = sock.recvmsg(size, socket.CMSG_SPACE(4 * _MAX_FDS), _CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(payload) // 4
            fds += struct.unpack(f"{count}i", payload[: count * 4])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise OSError("recvmsg: message truncated")
    return data, fds


def connect_in(dir_fd: int, name: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Connect to a socket in a directory, however long the directory's path is."""
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{dir_fd}/{name}")
    except BaseException:
        sock.close()
        raise
    return sock


def listen_in(dir_fd: int, name: str, backlog: int = 128) -> socket.socket:
    """Listen on a socket in a directory, replacing a stale one."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        try:
            os.unlink(name, dir_fd=dir_fd)
        except FileNotFoundError:
            pass
        sock.bind(f"/proc/self/fd/{dir_fd}/{name}")
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock
