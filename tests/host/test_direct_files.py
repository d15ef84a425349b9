"""File content that a supervisor takes from, and puts on, a socket it was handed."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from sandkeep.errors import PathPermission, TransportError
from sandkeep.host.driver import WriteOptions
from sandkeep.shared.sealed import read_sealed, write_sealed
from sandkeep.supervisor.direct import DirectSocket, DirectUpload
from tests.driver_lab import Box, Lab
from tests.mode_runner import MODES, Ask, common, everywhere, opened

SIZE = 3 << 20


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def _pair() -> tuple[socket.socket, socket.socket]:
    theirs, ours = socket.socketpair()
    theirs.setblocking(False)
    ours.settimeout(60)
    return theirs, ours


async def _upload(box: Box, path: str, sock: socket.socket, **options: Any) -> int:
    upload = await box.lab.driver.files(box.ref).open_write(path, options=WriteOptions(size=SIZE, **options))
    assert upload is not None
    try:
        return await upload.receive_from(sock.fileno(), left=SIZE - 7, first=b"already")
    finally:
        upload.close()


def _put(box: Box, path: str, content: bytes, **options: Any) -> int:
    theirs, ours = _pair()
    with theirs, ours:
        sender = threading.Thread(target=ours.sendall, args=(content[7:] + b"next request",))
        sender.start()
        try:
            return box.lab.do(_upload(box, path, theirs, **options))
        finally:
            sender.join()
            assert theirs.recv(100) == b"next request"


@everywhere
def test_content_goes_both_ways_and_not_a_byte_further(lab: Lab) -> None:
    box = common(lab)
    content = b"already" + os.urandom(SIZE - 7)
    assert _put(box, "direct", content, mode=0o640) == SIZE
    assert box.read("direct") == content
    found = box.files("stat", path="direct")
    assert (found.mode, found.size) == (0o640, SIZE)
    box.write("appended", b"before ")
    _put(box, "appended", content, append=True)
    assert box.read("appended") == b"before " + content

    async def download(sock: socket.socket) -> None:
        opened = await lab.driver.files(box.ref).open_read("direct", direct=True)
        assert opened.length == SIZE
        await opened.send_to(sock.fileno())
        await opened.aclose()

    theirs, ours = _pair()
    with theirs, ours:
        got = bytearray()
        reader = threading.Thread(target=lambda: _read(ours, SIZE, got))
        reader.start()
        lab.do(download(theirs))
        reader.join()
    assert got == content


def _read(sock: socket.socket, size: int, into: bytearray) -> None:
    while len(into) < size:
        into += sock.recv(1 << 16)


@everywhere
def test_what_is_refused_is_never_asked_for(lab: Lab) -> None:
    box = common(lab)

    async def open_refused() -> None:
        files, path = lab.driver.files(box.ref), "/proc/sys/kernel/hostname/x"
        await files.open_write(path, options=WriteOptions(size=SIZE))

    with pytest.raises(Exception, match="write"):
        lab.do(open_refused())
    if lab.driver.mode != "single":
        box.files("mkdir", path="/closed", root=True, mode=0o700)
        with pytest.raises(PathPermission):
            _refused_for_user(box)


def _refused_for_user(box: Box) -> None:
    async def open_closed() -> None:
        await box.lab.driver.files(box.ref).open_write("/closed/x", options=WriteOptions(size=SIZE))

    box.lab.do(open_closed())


@everywhere
def test_given_up_or_cut_off_nothing_appears(lab: Lab) -> None:
    box = common(lab)

    async def give_up() -> None:
        theirs, ours = _pair()
        with theirs, ours:
            ours.sendall(b"x" * 1000)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_upload(box, "given-up", theirs), 0.3)

    async def cut_off() -> None:
        theirs, ours = _pair()
        with theirs:
            ours.sendall(b"x" * 1000)
            ours.close()
            with pytest.raises(TransportError, match="disconnected"):
                await _upload(box, "cut-off", theirs)

    lab.do(give_up())
    lab.do(cut_off())
    names = {entry.name for entry in box.files("list", path=".")}
    assert not names & {"given-up", "cut-off"}
    assert not [name for name in names if name.startswith(".sandkeep")]


@everywhere
def test_an_older_supervisor_is_not_handed_anything(lab: Lab) -> None:
    box = lab.box()
    path = f"{box.directory}/state.json"
    write_sealed(path, read_sealed(path) | {"protocol": 1, "oldest": 1})

    async def open_old() -> object:
        return await lab.driver.files(box.ref).open_write("x", options=WriteOptions(size=SIZE))

    assert lab.do(open_old()) is None
    box.remove()


@everywhere
def test_a_small_file_can_be_read_while_it_is_rewritten(lab: Lab) -> None:
    """Truncated and written again and again: what comes is what was there at some moment."""
    box = common(lab)
    script = "while True:\n with open('state', 'w') as out: out.write('x' * 1000)"
    writer = box.start("python3", "-c", script, kill_after_ms=20_000)
    while box.sh("test -e state").code:
        pass
    sizes = {len(box.read("state")) for _ in range(100)}
    assert sizes <= {0, 1000}
    lab.do(lab.driver.signal(box.ref, 9, writer))


def test_urgent_data_does_not_keep_a_thread_busy() -> None:
    control, other = socket.socketpair()
    with control, other, socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        taken, _ = listener.accept()
        taken.setblocking(False)
        incoming = DirectUpload(lambda: (DirectSocket(taken, control), 100), lambda size: b"")
        with client, closing(incoming):
            client.sendall(b"abc")
            client.send(b"!", socket.MSG_OOB)
            client.sendall(b"def")
            assert incoming(1) == b""
            data = b""
            while len(data) < 6:
                count = incoming.fetch()
                data += os.read(incoming.pipe, count)
            assert data == b"abcdef"
            client.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionResetError):
                incoming.fetch()
