"""Addresses that neither sandboxes reach through netd nor callers through what the server fetches."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

Address = IPv4Address | IPv6Address
AddressRange = IPv4Network | IPv6Network

_REFUSED: tuple[tuple[str, AddressRange], ...] = tuple(
    (kind, ip_network(text))
    for kind, texts in {
        "a metadata service": (
            "169.254.169.254/32",
            "168.63.129.16/32",
            "100.100.100.200/32",
            "fd00:ec2::/32",
        ),
        "loopback": ("127.0.0.0/8", "::1/128"),
        "link-local": ("169.254.0.0/16", "fe80::/10"),
        "private": (
            "10.0.0.0/8",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "100.64.0.0/10",
            "fc00::/7",
            "fec0::/10",
        ),
        "multicast": ("224.0.0.0/4", "ff00::/8"),
        "reserved": ("0.0.0.0/8", "192.0.0.0/24", "198.18.0.0/15", "240.0.0.0/4", "::/128"),
        # Each of these carries an IPv4 address inside, which the ranges above would not see.
        "a tunnel address": ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"),
    }.items()
    for text in texts
)


def special_kind(address: Address) -> str | None:
    """Return the kind of an address that only the operator can allow; ``None`` for any other."""
    address = unmapped(address)
    for kind, network in _REFUSED:
        if address.version == network.version and address in network:
            return kind
    return None


def unmapped(address: Address) -> Address:
    """Return an IPv4-mapped IPv6 address as IPv4, any other as it is."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
