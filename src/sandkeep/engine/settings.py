"""What an operator decides about an installation. Everything has a default that works on a laptop."""

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
    """What an operator decides about the network of every session."""

    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names with fixed addresses; no name server is asked about them."""
    allowed: Sequence[str] = ()
    """Private, loopback or link-local ranges that policies may allow; they are refused otherwise."""
    host_ports: Sequence[int] = ()
    """Ports of this machine that tokens may give to their sandboxes; the local user may give any."""
    name_servers: Sequence[str] = ()
    """Addresses, with a port after ``#`` where it is not 53. None: those of the machine."""
    own_ports: Sequence[int] = ()
    """Ports the server itself listens on, out of every session's reach."""
    connections: int = 1024
    """Open at once, per session."""
    dns_rate: float = 200
    """Queries per second and session."""
    trusted: Sequence[str] = ()
    """Files with certificates of authorities that inspected servers may have, besides the machine's own."""
    issuer: str = "sandkeep"
    """Who signs the tokens of forwarded requests: the URL this server is known by, where it has one."""
    ingress_address: str = "127.0.0.1"
    ingress_port: int = 4280
    """Where requests to sandboxes' ports are taken; another one when it is in use, and 0 for any."""
    ingress_domain: str | None = None
    """A domain whose every subdomain leads to the ingress, behind something that speaks TLS."""
    protect_routes: bool = False
    """Only requests that show a route's token reach the port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    default_image: str = "host"
    images: Mapping[str, str] = field(default_factory=_default_images)
    """Runtime and managed image names to local images; anything else must name a local image itself."""
    max_timeout_ms: int = _DAY_MS
    """Longest a session may be given to live, extensions included."""
    snapshot_lifetime_ms: int = 30 * _DAY_MS
    """Of snapshots whose sandbox says nothing; 0 is for ever."""
    session_history_ms: int = 30 * _DAY_MS
    """How long sessions of destroyed sandboxes, and events, are remembered."""
    set_aside_ms: int = 7 * _DAY_MS
    """How long layers and sessions on disk are kept that the store does not know."""
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
    """Answer a stop or snapshot only once its snapshot would survive a power failure."""
    accept: frozenset[str] = frozenset()
    """Isolation barriers the operator agrees to do without on a machine that cannot build them."""
    fold_depth: int = 30
    log_cap_bytes: int = 128 << 20
    network: NetworkSettings = field(default_factory=NetworkSettings)
    private_sources: bool = False
    """Let git and tarball sources, and images, come from loopback and private addresses."""
    max_image_bytes: int = 20 << 30
    """Of one image that is pulled: as it is downloaded, and as it is unpacked."""
    max_image_entries: int = 2_000_000
    """Files, directories and links of one image that is pulled."""
    max_images: int = 100
    """Pulled by one project."""
    max_images_bytes: int = 100 << 30
    """Unpacked, of all images of a project."""
    max_source_bytes: int = 10 << 30
    """Of one git or tarball source as it is fetched."""
    max_pull_ms: int = 60 * 60 * 1000
    """Time one pull, or the download of a tarball, may take."""
    min_free_percent: float = 5
    """Of the disk: what pulls leave to everything else."""
    insecure_registries: Sequence[str] = ()
    """Registries, by host and port, that tokens may pull from over plain HTTP or untrusted certificates."""
    proxy: str | None = None
    """An HTTP proxy that sources and images are fetched through; it judges the names it is asked for."""
