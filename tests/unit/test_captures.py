"""What is kept of captured output."""

from __future__ import annotations

import pytest

from sandkeep.sdk.sinks import Capture


@pytest.mark.parametrize("limit", [1, 2, 3, 10, 64])
@pytest.mark.parametrize("piece", [1, 3, 7, 100])
def test_a_bounded_capture_is_the_first_half_and_the_last_however_the_bytes_arrive(
    limit: int, piece: int
) -> None:
    written = bytes(range(256))[:100]
    held = Capture(limit)
    for start in range(0, len(written), piece):
        held.write(written[start : start + piece])
        so_far = written[: start + piece]
        first, last = limit - limit // 2, limit // 2
        kept = so_far if len(so_far) <= limit else so_far[:first] + so_far[len(so_far) - last :]
        assert (held.value(), held.omitted) == (kept, len(so_far) - len(kept))
        assert len(held._tail) <= 2 * last, "memory is bounded"


def test_without_a_limit_a_capture_is_everything() -> None:
    held = Capture()
    held.write(b"ab")
    held.write(b"c")
    assert (held.value(), held.omitted) == (b"abc", 0)
