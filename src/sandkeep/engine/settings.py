"""What an operator configures for an installation. Every setting has a default that works on a laptop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_DAY_MS = 24 * 60 * 60 * 1000

RUNTIMES = ("node22", "node24", "node26", "python3.13", "python3.14")
MANAGED_IMAGES = (
    "vercel/sandbox/universal",
    "vercel/sandbox/node:22",
    "vercel/sandbox/node:24",
    "vercel/sandbox/node:26",
    "vercel/sandbox/python:3.14",
    "vercel/sandbox/ubuntu",
    "vercel/sandbox/arch",
)


def _default_images() -> dict[str, str]:
    return dict.fromkeys((*RUNTIMES, *MANAGED_IMAGES), "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """What an operator configures for the network of every session."""

    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names with fixed addresses, for which no name server is asked."""
    allowed: Sequence[str] = ()
    """Private, loopback or link-local ranges that policies may allow; others are refused."""
    host_ports: Sequence[int] = ()
    """Ports of this machine that tokens may give to their sandboxes; the local user may give any."""
    name_servers: Sequence[str] = ()
    """Addresses, with a port after ``#`` if it is not 53. Empty: those of the machine."""
    own_ports: Sequence[int] = ()
    """Ports the server itself listens on, which no session can reach."""
    connections: int = 1024
    """Connections open at once, per session."""
    dns_rate: float = 200
    """Queries per second and session."""
    trusted: Sequence[str] = ()
    """Files with certificates of authorities that inspected servers may have, besides the machine's own."""
    issuer: str = "sandkeep"
    """Issuer of the tokens of forwarded requests: the URL of this server, if it has one."""
    ingress_address: str = "127.0.0.1"
    ingress_port: int = 4280
    """Port for requests to sandboxes' ports; another is used when it is taken, and 0 means any."""
    ingress_domain: str | None = None
    """A domain whose every subdomain leads to the ingress, behind a proxy that speaks TLS."""
    protect_routes: bool = False
    """Whether only requests with a route's token reach the port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    default_image: str = "host"
    images: Mapping[str, str] = field(default_factory=_default_images)
    """Runtime and managed image names to local images; anything else must name a local image itself."""
    max_timeout_ms: int = _DAY_MS
    """Longest lifetime a session may be given, extensions included."""
    snapshot_lifetime_ms: int = 30 * _DAY_MS
    """Lifetime of snapshots whose sandbox has no setting for it; 0 is forever."""
    session_history_ms: int = 30 * _DAY_MS
    """How long sessions of destroyed sandboxes, and events, are kept."""
    set_aside_ms: int = 7 * _DAY_MS
    """How long layers and sessions that the store does not know are kept on disk."""
    max_sandboxes: int = 10_000
    max_active_sessions: int = 1_000
    """Per project."""
    pool: int = 2
    """Sessions kept prepared ahead of requests, so that creates are quick; a few megabytes each."""
    enforce_memory: bool = True
    """Limit each session to the memory its sandbox names, where the machine can."""
    pids: int = 4096
    disk_bytes: int | None = None
    stop_grace_ms: int = 0
    """Time between SIGTERM and the end when a session stops."""
    durable: bool = False
    """Respond to a stop or snapshot only once its snapshot survives a power failure."""
    accept: frozenset[str] = frozenset()
    """Isolation barriers the operator agrees to do without on a machine that cannot build them."""
    fold_depth: int = 30
    log_cap_bytes: int = 128 << 20
    network: NetworkSettings = field(default_factory=NetworkSettings)
    private_sources: bool = False
    """Let git and tarball sources, and images, come from loopback and private addresses."""
    max_image_bytes: int = 20 << 30
    """Size of one pulled image, both as downloaded and as unpacked."""
    max_image_entries: int = 2_000_000
    """Files, directories and links of one pulled image."""
    max_images: int = 100
    """Images pulled by one project."""
    max_images_bytes: int = 100 << 30
    """Unpacked size of all images of a project."""
    max_source_bytes: int = 10 << 30
    """Size of one git or tarball source as it is fetched."""
    max_pull_ms: int = 60 * 60 * 1000
    """Time one pull, or the download of a tarball, may take."""
    min_free_percent: float = 5
    """Part of the disk that pulls leave free."""
    insecure_registries: Sequence[str] = ()
    """Registries, by host and port, that tokens may pull from over plain HTTP or untrusted certificates."""
    proxy: str | None = None
    """An HTTP proxy that sources and images are fetched through; it judges the names it is asked for."""
