"""What a caller of the worker may have it connect to, as every kind of user."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from sandkeep.errors import ImageError
from sandkeep.host.images.transport import Access
from sandkeep.reach import Destination, Reach, Unreachable, is_own
from tests.driver_lab import Lab
from tests.mode_runner import MODES, Ask, everywhere, opened

TOKEN = Access(Reach(), operator=False)
OPERATOR = Access(Reach(private=True))


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


@everywhere
def test_a_pull_connects_to_loopback_for_the_operator_only(lab: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        reference = f"127.0.0.1:{listener.getsockname()[1]}/app"
        with pytest.raises(ImageError, match="cannot be reached"):
            lab.do(lab.storage.pull_image(reference, access=TOKEN))
        with pytest.raises(BlockingIOError):
            listener.accept()
        listener.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ImageError):
        lab.do(lab.storage.pull_image(reference, access=OPERATOR))


def test_a_machines_own_addresses_are_known_without_a_packet() -> None:
    assert is_own(Destination(socket.AF_INET, ("127.0.0.1", 1)))
    assert not is_own(Destination(socket.AF_INET, ("192.0.2.1", 1)))


@pytest.mark.parametrize("host", ["", "no-such-name.invalid", "a" * 70, "\udc80", "127.1", "0", "2130706433"])
def test_whatever_is_wrong_with_a_host_has_one_answer(host: str) -> None:
    with pytest.raises(Unreachable):
        Reach().places(host, 80)
