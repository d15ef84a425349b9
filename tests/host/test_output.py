"""Output as it is kept: ordered, complete or with explicit gaps, readable by anyone later."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sandkeep.errors import SandkeepError
from sandkeep.linux import sockets
from sandkeep.shared import protocol
from sandkeep.shared.outputlog import Chunk, End, Gap, Item
from tests.driver_lab import Box, Lab
from tests.mode_runner import MODES, Ask, common, everywhere, in_modes, opened
from tests.polling import ENOUGH

PIDFD_GETFD = 438


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def joined(items: list[Item]) -> bytes:
    return b"".join(item.data for item in items if isinstance(item, Chunk))


# --- the log -------------------------------------------------------------------------------------------


@everywhere
def test_both_streams_are_kept_in_the_order_they_were_written(lab: Lab) -> None:
    # Each is logged before the next is written: of what comes at once the order is not known.
    box = common(lab)
    script = "import os\nfor n in range(20): os.write(1 + n % 2, f'{n} '.encode()); os.read(0, 1)"
    process = box.start("python3", "-c", script, stdin=True)

    async def step_by_step() -> None:
        async for item in lab.driver.output(box.ref, process):
            if isinstance(item, Chunk):
                await lab.driver.write_stdin(box.ref, process, b"x")

    lab.do(asyncio.wait_for(step_by_step(), ENOUGH))
    done = box.finish(process)
    assert done.output == b"".join(b"%d " % n for n in range(20))
    assert done.stdout == "".join(f"{n} " for n in range(0, 20, 2))
    assert done.stderr == "".join(f"{n} " for n in range(1, 20, 2))
    chunks = [item for item in done.items if isinstance(item, Chunk)]
    assert [chunk.time_us for chunk in chunks] == sorted(chunk.time_us for chunk in chunks)
    assert abs(chunks[0].time_us / 1e6 - time.time()) < 60
    assert isinstance(done.items[-1], End) and done.record.output_bytes == len(done.output)


@everywhere
def test_a_replay_from_any_offset_is_the_rest_of_the_whole(lab: Lab) -> None:
    box = common(lab)
    script = "import os\nfor n in range(300): os.write(1 + n % 2, os.urandom(n * 7 % 500))"
    process = box.start("python3", "-c", script)
    whole = box.finish(process).output
    edges = [0, 1, len(whole) - 1, len(whole)]
    for offset in edges + random.Random(1).sample(range(len(whole)), 40):
        items = box.output(process, offset)
        assert joined(items) == whole[offset:]
        place = offset
        for item in items:
            assert item.offset == place
            place += len(item.data) if isinstance(item, Chunk) else 0


@everywhere
def test_output_is_followed_live_by_somebody_who_came_later(lab: Lab) -> None:
    """Another driver on the same data directory sees each line while the process still runs."""
    box = common(lab)
    process = box.start("bash", "-c", "for n in 1 2 3; do echo $n; read line; done; echo end", stdin=True)
    with Lab(lab.data_dir) as other:
        elsewhere = Box(other, box.ref, box.created, box.rootfs)

        async def follow() -> list[str]:
            seen = []
            async for item in other.driver.output(elsewhere.ref, process):
                if isinstance(item, Chunk):
                    text = item.data.decode()
                    seen.append(text)
                    if text != "end\n":
                        await other.driver.write_stdin(elsewhere.ref, process, b"go on\n")
            return seen

        assert other.do(asyncio.wait_for(follow(), ENOUGH)) == ["1\n", "2\n", "3\n", "end\n"]
    assert box.finish(process).code == 0


@everywhere
def test_a_log_over_its_cap_keeps_both_ends_and_says_what_is_missing(lab: Lab) -> None:
    box = common(lab)
    cap = 1 << 20
    script = "import sys\nfor n in range(1_000_000): sys.stdout.write(f'{n:09d}\\n')"
    process = box.start("python3", "-c", script, log_cap_bytes=cap)
    record = lab.do(lab.driver.wait_process(box.ref, process))
    assert (record.exit_code, record.output_bytes) == (0, 10_000_000)
    done = box.finish(process)
    assert len(done.gaps) == 1
    assert record.dropped_bytes == done.gaps[0].length
    _check_lines(done.items, 10_000_000)
    kept = len(done.output)
    assert cap // 2 < kept < 2 * cap
    used = sum(os.stat(entry).st_size for entry in os.scandir(f"{box.directory}/processes/{process}"))
    assert used < 2 * cap
    # Reading from the middle of what is missing starts with the rest of the gap.
    middle = done.gaps[0].offset + done.gaps[0].length // 2
    rest = box.output(process, middle)
    assert rest[0] == Gap(middle, done.gaps[0].offset + done.gaps[0].length - middle)


def _check_lines(items: list[Item], total: int) -> None:
    """Every byte kept is the one a writer of nine-digit line numbers wrote at that offset."""
    place = 0
    for item in items:
        assert item.offset == place
        if isinstance(item, Gap):
            place += item.length
        elif isinstance(item, Chunk):
            first, skip = divmod(place, 10)
            last = (place + len(item.data)) // 10 + 1
            expected = b"".join(b"%09d\n" % n for n in range(first, last + 1))
            assert item.data == expected[skip : skip + len(item.data)]
            place += len(item.data)
    assert place == total


@in_modes("root", "single", why="the third mode shows nothing more and takes its time")
def test_ten_million_lines_are_kept_or_counted(lab: Lab) -> None:
    box = lab.box()
    done = box.sh("yes 123456789 | head -n 10000000", timeout=200)
    assert done.code == 0
    assert done.record.output_bytes == 100_000_000
    assert len(done.output) + sum(gap.length for gap in done.gaps) == 100_000_000
    assert done.gaps == [] and done.output.count(b"123456789\n") == 10_000_000
    assert box.run("true").code == 0


@everywhere
def test_a_slow_reader_holds_nobody_up(lab: Lab) -> None:
    box = common(lab)
    process = box.start("bash", "-c", "head -c 20000000 /dev/zero; echo done >&2")

    async def slow() -> int:
        seen = 0
        async for item in lab.driver.output(box.ref, process):
            if isinstance(item, Chunk):
                if seen == 0:
                    record = await lab.driver.wait_process(box.ref, process)
                    assert record.exit_code == 0
                seen += len(item.data)
        return seen

    assert lab.do(asyncio.wait_for(slow(), ENOUGH)) == 20_000_005


@everywhere
def test_output_outlives_the_session_and_whoever_asked(lab: Lab) -> None:
    other = Lab(lab.data_dir)
    box = other.box(name=f"outlive-{os.getpid()}")
    finished = box.start("bash", "-c", "echo kept; echo too >&2")
    box.finish(finished)
    running = box.start("bash", "-c", "echo started; sleep 100")
    while b"started" not in joined(box.output(running)):
        time.sleep(0.01)
    other.boxes.clear()
    other.detach()
    again = lab.adopt(box.ref.session)
    assert joined(again.output(finished)) == b"kept\ntoo\n"
    state = again.stop()
    assert state.status == "stopped"
    done = again.finish(finished)
    assert (done.code, done.output) == (0, b"kept\ntoo\n")
    lost = again.finish(running)
    assert (lost.record.status, lost.code, lost.output) == ("lost", None, b"started\n")
    assert lost.record.reason == "test"
    assert isinstance(lost.items[-1], End)


@everywhere
def test_following_an_ended_process_whose_end_was_dropped_ends(lab: Lab) -> None:
    """A child that writes on can push the end of its parent out of a small log."""
    box = common(lab)
    child = "until [ -e /tmp/write-on ]; do sleep 0.02; done; head -c 3000000 /dev/zero; echo over"
    process = box.start("bash", "-c", f"({child}) & echo first", log_cap_bytes=65_536)
    assert box.finish(process).stdout == "first\n"
    box.write("/tmp/write-on", b"")
    while b"over" not in joined(box.output(process))[-10:]:
        time.sleep(0.02)
    done = box.finish(process)
    assert done.code == 0
    assert len(box.output(process, 3_000_000)) >= 1


# --- the supervisor against its clients ----------------------------------------------------------------


def _raw(box: Box) -> socket.socket:
    fd = os.open(box.directory, os.O_PATH | os.O_DIRECTORY)
    try:
        sock = sockets.connect_in(fd, "supervisor.sock")
    finally:
        os.close(fd)
    sock.settimeout(ENOUGH)
    return sock


def _answer(sock: socket.socket) -> dict[str, Any] | None:
    """The next answer, or None if the supervisor closed the connection."""
    header = b""
    while len(header) < protocol.HEADER.size:
        part = sock.recv(protocol.HEADER.size - len(header))
        if not part:
            return None
        header += part
    length, blob = protocol.decode_header(header)
    data = b""
    while len(data) < length + blob:
        data += sock.recv(length + blob - len(data))
    return protocol.decode_json(data[:length])


def _request(box: Box, body: Any) -> dict[str, Any] | None:
    text = json.dumps(body).encode()
    with _raw(box) as sock:
        sock.sendall(protocol.HEADER.pack(len(text), 0) + text)
        return _answer(sock)


def _healthy(box: Box) -> None:
    assert box.sh("echo fine").stdout == "fine\n"
    assert box.state().status == "running"


@everywhere
def test_bytes_that_are_no_frames_end_the_connection_and_nothing_else(lab: Lab) -> None:
    box = lab.box()
    deep = b"[" * 1_000_000
    hostile = [
        b"GET / HTTP/1.1\r\n\r\n",
        protocol.HEADER.pack(protocol.MAX_JSON + 1, 0),
        protocol.HEADER.pack(0, protocol.MAX_BLOB + 1),
        protocol.HEADER.pack(0xFFFFFFFF, 0xFFFFFFFF),
        protocol.HEADER.pack(4, 0) + b"nope",
        protocol.HEADER.pack(2, 0) + b"[]",
        protocol.HEADER.pack(4, 0) + b"null",
        protocol.HEADER.pack(4, 0) + b'"\xff\xfe"',
        protocol.HEADER.pack(len(deep), 0) + deep,
    ]
    for data in hostile:
        with _raw(box) as sock:
            sock.sendall(data)
            try:
                assert _answer(sock) is None
            except ConnectionResetError:
                pass
    generator = random.Random(7)
    for _ in range(200):
        with _raw(box) as sock:
            try:
                sock.sendall(generator.randbytes(generator.randrange(1, 2000)))
            except (BrokenPipeError, ConnectionResetError):
                pass
    half = _raw(box)
    half.sendall(protocol.HEADER.pack(1000, 0) + b"{")
    _healthy(box)
    half.close()
    _healthy(box)


@everywhere
def test_requests_of_any_shape_are_answered(lab: Lab) -> None:
    box = lab.box()
    box.run("true", process="known")
    operations: list[Any] = [
        *("hello", "session.info", "session.usage", "process.list", "process.get", "process.wait"),
        *("process.output", "process.signal", "process.stdin", "process.resize", "process.start"),
        *("fs.stat", "fs.list", "fs.read", "session.extend", "nonsense", "", None, 5, [], {}),
    ]
    values: list[Any] = [
        *(None, True, -1, 0, 2**70, 1.5, float("inf"), float("nan"), "", "\0", "\ud800", "known", "x" * 5000),
        *([], [[]], ["true"], {}, {"a": 1}, {"A": "b"}),
    ]
    fields = [
        *("process", "argv", "env", "cwd", "user", "root", "pty", "rlimits", "kill_after_ms", "offset"),
        *(
            "signal",
            "rows",
            "columns",
            "path",
            "deadline_ms",
            "log_cap_bytes",
            "generation",
            "close",
            "stdin",
        ),
    ]
    generator = random.Random(11)
    for number in range(600):
        body: dict[str, Any] = {"id": number, "op": generator.choice(operations)}
        if body["op"] == "process.start" or generator.random() < 0.2:
            body |= {"process": f"fuzz{number}", "argv": ["true"]}
        for name in generator.sample(fields, generator.randrange(5)):
            body[name] = generator.choice(values)
        body.pop("deadline_ms", None)  # some of these would rightly stop the session
        if body["op"] in ("process.wait", "process.output"):
            body["process"] = generator.choice(["known", "unknown", *values[:5]])
        if body["op"] == "process.signal" and body.get("process") is None:
            body["process"] = "known"
        answer = _request(box, body)
        assert answer is not None and answer["id"] == number, body
        assert "ok" in answer or answer["error"]["code"], body
        if "error" in answer:
            assert answer["error"]["code"] != "internal_error", (body, answer)
    _healthy(box)


@everywhere
def test_a_request_without_an_id_is_refused_before_it_can_hurt(lab: Lab) -> None:
    box = lab.box()
    running = box.start("bash", "-c", "read line; echo $line", stdin=True)
    for body in (
        {"op": "process.output", "process": running, "offset": 0},
        {"op": "process.wait", "process": running},
        {"op": "session.wait"},
        {"op": "process.start", "process": "x", "argv": ["true"]},
    ):
        answer = _request(box, body)
        assert answer is not None and answer["error"]["code"] == "invalid_request"
    # Asking to wait and going away is no harm either.
    for body in ({"id": 1, "op": "process.wait", "process": running}, {"id": 2, "op": "session.wait"}):
        with _raw(box) as sock:
            sock.sendall(protocol.encode(body))
    lab.do(lab.driver.write_stdin(box.ref, running, b"still here\n"))
    assert box.finish(running).stdout == "still here\n"
    _healthy(box)


@everywhere
def test_a_deadline_beyond_what_the_kernel_can_wait_for_is_kept(lab: Lab) -> None:
    box = lab.box()
    far = int(time.time() * 1000) + 10**12
    lab.do(lab.driver.set_deadline(box.ref, far))
    assert box.run("true", kill_after_ms=10**11).code == 0
    _healthy(box)
    assert box.state().deadline_ms == far


@everywhere
def test_a_client_that_never_reads_is_cut_off(lab: Lab) -> None:
    box = lab.box()
    request = protocol.encode({"id": 1, "op": "session.info"}) * 100
    with _raw(box) as sock, pytest.raises((BrokenPipeError, ConnectionResetError)):
        for _ in range(2000):
            sock.sendall(request)
    _healthy(box)


@in_modes("root", why="only real root can take init's socket away from it")
def test_whatever_init_says_the_supervisor_goes_on(lab: Lab) -> None:
    """Speak to the supervisor through init's own end of their socket, as an init taken over would."""
    box = lab.box()
    victim = box.start("sleep", "100")
    pidfd = os.pidfd_open(int(box.created.init_pid))
    try:
        fd = ctypes.CDLL(None).syscall(PIDFD_GETFD, pidfd, 3, 0)
    finally:
        os.close(pidfd)
    assert fd >= 0
    generator = random.Random(5)
    with socket.socket(fileno=fd) as control:
        odd: list[Any] = [None, [], {}, "nobody", 5]
        messages: list[bytes] = [
            *(b"", b"\0", b"{", b"[]", b"null", b"5", b'"x"', b"[" * 50_000, b"\xff" * 100),
            *(json.dumps({kind: value}).encode() for kind in ("exit", "started", "failed") for value in odd),
            json.dumps({"exit": victim}).encode(),
            json.dumps({"exit": victim, "status": "x", "cpu_ms": 1}).encode(),
            json.dumps({"exit": victim, "status": 2**80, "cpu_ms": 1}).encode(),
            json.dumps({"exit": victim, "status": float("inf"), "cpu_ms": 1}).encode(),
            json.dumps({"exit": victim, "status": 0, "cpu_ms": float("nan")}).encode(),
            *(generator.randbytes(generator.randrange(1, 500)) for _ in range(100)),
        ]
        for message in messages:
            if message:
                control.send(message)
        read, write = os.pipe()
        for _ in range(50):
            socket.send_fds(control, [b"{}"], [read, write])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("100i", *([read] * 100)))]
        control.sendmsg([b"{}"], ancillary)
        os.close(read)
        os.close(write)
    _healthy(box)
    assert lab.do(lab.driver.process(box.ref, victim)).status == "running"
    open_fds = os.listdir(f"/proc/{box.created.supervisor_pid}/fd")
    assert len(open_fds) < 30, "descriptors sent along with nonsense are closed"
    with pytest.raises(SandkeepError):
        box.run("no-such-program")
