"""Floods from inside: each is bounded, netd stays small, and another sandbox does not notice."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from sandkeep.policy import NetworkPolicy, Rule, Transform
from tests.driver_lab import Lab
from tests.net.network_lab import Authority, Box, Net, echo, hello, inspecting

pytestmark = pytest.mark.root

FLOOD = (Path(__file__).parent / "flood.py").read_text()
RULED = {"one.test": [Rule(Transform((("x-set", "1"),)))], "*.one.test": [], "two.test": []}


@pytest.fixture(scope="module")
def lab(test_area: Path) -> Iterator[Lab]:
    with Lab(str(test_area / "lab")) as lab:
        yield lab


@pytest.fixture
def place(lab: Lab) -> Iterator[tuple[Net, Authority, Box]]:
    with inspecting(lab) as (net, authority):
        box = net.box(NetworkPolicy.custom(RULED))
        _bring(box)
        yield net, authority, box


def _bring(box: Box) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in ("h2", "hpack", "hyperframe"):
            spec = find_spec(name)
            assert spec is not None and spec.origin is not None
            archive.add(os.path.dirname(spec.origin), name)

    async def pieces() -> AsyncIterator[bytes]:
        yield data.getvalue()

    project, session = box.session.project, box.session.id
    box.net.do(box.net.engine.files.extract(project, session, pieces(), cwd="/tmp/lib"))
    box.sh(f"cat > /tmp/flood.py <<'END'\n{FLOOD}\nEND")


def memory(net: Net) -> int:
    with open(f"/proc/{net.engine.network.pid}/status", encoding="ascii") as handle:
        return next(int(line.split()[1]) for line in handle if line.startswith("VmRSS")) << 10


def flood(box: Box, what: str, host: str, port: int, *more: int) -> tuple[str, int]:
    """What the flood reports, and by how much netd grew."""
    before = memory(box.net)
    argv = " ".join(map(str, (what, host, port, *more)))
    out = box.sh(f"PYTHONPATH=/tmp/lib python3 /tmp/flood.py {argv}", timeout=200)
    return out, memory(box.net) - before


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server with very much to say."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
    for _ in range(10_000):
        writer.write(bytes(100_000))
        await writer.drain()


def test_connections_beyond_the_limit_are_reset(place: tuple[Net, Authority, Box]) -> None:
    net, _, box = place
    port, web = net.serve(echo), net.serve(hello)
    other = net.box()
    out, grown = flood(box, "connections", "two.test", port)
    assert out == "1024 open"
    assert grown < 30 << 20
    assert other.sh(f"curl -sS -m 50 http://two.test:{web}/") == "hello from two.test"


def test_a_flood_of_queries_is_answered_at_its_rate_only(place: tuple[Net, Authority, Box]) -> None:
    _, _, box = place
    out, grown = flood(box, "queries", "-", 0)
    sent, _, answered, _ = out.split()
    assert int(sent) > 3 * int(answered) and int(answered) < 2500
    assert grown < 20 << 20
    assert box.events("limit", limit="dns")
    assert len(box.events()) < 3000


def test_heads_that_never_end_are_cut(place: tuple[Net, Authority, Box]) -> None:
    net, authority, box = place
    port = net.serve(hello, ssl=authority.server("one.test"))
    out, grown = flood(box, "slow_heads", "one.test", port)
    assert out == "60 cut" and grown < 60 << 20
    out, grown = flood(box, "huge_head", "one.test", port)
    assert int(out.split()[0]) < 8 and grown < 10 << 20


def test_streams_without_credit_or_purpose_cost_nothing(place: tuple[Net, Authority, Box]) -> None:
    net, authority, box = place
    port = net.serve(endless, ssl=authority.server("one.test"))
    out, grown = flood(box, "no_window", "one.test", port)
    assert int(out.split()[0]) < 1024 and grown < 60 << 20
    out, grown = flood(box, "resets", "one.test", port)
    assert int(out.split()[0]) < 2000 and grown < 30 << 20


PRIORITY, WINDOW_UPDATE, UNKNOWN = 2, 8, 200


@pytest.mark.parametrize("kind", [PRIORITY, WINDOW_UPDATE, UNKNOWN])
def test_frames_that_carry_nothing_are_counted_whatever_their_kind(
    place: tuple[Net, Authority, Box], kind: int
) -> None:
    net, _, box = place
    out, grown = flood(box, "frames", "one.test", net.serve(hello), kind)
    assert 0 < int(out.split()[0]) < 2000 and grown < 10 << 20


def test_a_body_of_one_byte_chunks_arrives_whole_and_in_fewer_pieces(
    place: tuple[Net, Authority, Box],
) -> None:
    net, _, box = place
    pieces: list[int] = []

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while size := int(await reader.readline(), 16):
            pieces.append(len((await reader.readexactly(size + 2)).strip()))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    out, _ = flood(box, "chunks", "one.test", net.serve(count))
    assert out.startswith("HTTP/1.1 200") and sum(pieces) == 50_000
    assert len(pieces) < 25_000


def test_a_neighbour_is_served_while_requests_and_downloads_never_end(
    place: tuple[Net, Authority, Box],
) -> None:
    net, _, box = place
    web, bulk = net.serve(hello), net.serve(endless)
    other = net.box()
    ask = f"while :; do curl -sS -o /dev/null http://one.test:{web}/; done"
    load = f"while :; do curl -sS -o /dev/null http://two.test:{bulk}/; done"
    net.do(box.start("\n".join([f"({ask}) &"] * 20 + [f"({load}) &"] * 20)))
    net.until(lambda: box.row().ingress_bytes > 1 << 20)
    asked = f"for i in $(seq 20); do curl -sS -m 20 http://two.test:{web}/; done"
    assert other.sh(asked).split("\n") == ["hello from two.test"] * 20
