"""Addresses that stand for names: so netd knows the name behind a connection of any protocol.

Each session has its own. A name that may be reached is answered with an address of 198.18.0.0/15, which the
session then connects to; the address leads back to the name. Addresses are given out round robin over the
whole range, so one is not used for another name until long after every client has forgotten it.
"""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv4Address, IPv4Network
from typing import Final

RANGE: Final = IPv4Network("198.18.0.0/15")
MOST_NAMES: Final = 8192
TTL: Final = 30


class FakeNames:
    def __init__(self, *, most: int = MOST_NAMES) -> None:
        self._most = most
        self._first = int(RANGE.network_address) + 1
        self._size = RANGE.num_addresses - 2
        self._next = 0
        self._addresses: OrderedDict[str, int] = OrderedDict()
        self._names: dict[int, str] = {}
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def address(self, name: str) -> IPv4Address:
        """Return the address that stands for a name, the same for as long as a client may have it cached."""
        found = self._addresses.get(name)
        if found is None:
            found = self._allocate()
            self._addresses[name] = found
            self._names[found] = name
            self._trim()
        self._addresses.move_to_end(name)
        return IPv4Address(found)

    def name(self, address: IPv4Address) -> str | None:
        return self._names.get(int(address))

    def hold(self, name: str) -> None:
        """A connection to this name is open: keep its address."""
        self._held[name] = self._held.get(name, 0) + 1

    def release(self, name: str) -> None:
        left = self._held[name] - 1
        if left:
            self._held[name] = left
        else:
            del self._held[name]

    def _allocate(self) -> int:
        while True:
            address = self._first + self._next
            self._next = (self._next + 1) % self._size
            if address not in self._names:
                return address

    def _trim(self) -> None:
        if len(self._addresses) <= self._most:
            return
        for name in self._addresses:
            if name not in self._held:
                del self._names[self._addresses.pop(name)]
                return
