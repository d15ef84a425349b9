"""Options several commands share, and what they mean to the SDK."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import click

from sandkeep.cli.framework import absent, option, options
from sandkeep.cli.values import (
    DURATION,
    LIFETIME,
    MOUNT,
    NUMBER,
    PORT,
    TAG,
    TRUTH,
    VARIABLE,
    NumberType,
)
from sandkeep.types import MAX_RETAINED, NetworkPolicy, Resources, SnapshotRetention, SnapshotSource

if TYPE_CHECKING:
    from sandkeep.sync import Configuration, NewConfiguration

SANDBOX, NETWORK, SNAPSHOTS, ACCEPTED, COMMAND = (
    "Sandbox options",
    "Network options",
    "Snapshot options",
    "Accepted, without effect here",
    "Command options",
)

network = options(
    option(
        "--network-policy",
        type=click.Choice(["allow-all", "deny-all"]),
        section=NETWORK,
        help="Reach everything (the default) or nothing. For anything between, use the options below.",
    ),
    option(
        "--allowed-domain",
        multiple=True,
        metavar="DOMAIN",
        section=NETWORK,
        help="Reach this domain and otherwise only what is allowed too; '*.example.com' is every name below. "
        "Can be repeated.",
    ),
    option(
        "--allowed-cidr",
        multiple=True,
        metavar="CIDR",
        section=NETWORK,
        help="Reach these addresses, by whatever name. Can be repeated.",
    ),
    option(
        "--denied-cidr",
        multiple=True,
        metavar="CIDR",
        section=NETWORK,
        help="Never reach these addresses, whatever else is allowed. Can be repeated.",
    ),
)

_snapshots = options(
    option("--snapshot-expiration", type=LIFETIME, section=SNAPSHOTS, help="How long snapshots live."),
    option(
        "--keep-last-snapshots",
        type=NumberType(1, MAX_RETAINED),
        metavar="COUNT",
        section=SNAPSHOTS,
        help="Keep only so many snapshots, the newest.",
    ),
    option(
        "--keep-last-snapshots-for", type=LIFETIME, section=SNAPSHOTS, help="How long the kept ones live."
    ),
    option(
        "--delete-evicted-snapshots",
        type=TRUTH,
        section=SNAPSHOTS,
        help="Delete a snapshot when a newer one pushes it out (the default), or let it expire.",
    ),
)

ONE_PLACE: Final = "sandboxes run where their server is"
NO_NETWORKS: Final = "there are no private networks here; 'network-policy' says what may be reached"


region = option(
    "--region", metavar="REGION", section=ACCEPTED, help="A region; sandboxes run where their server is."
)
_elsewhere = options(
    region,
    option(
        "--failover-regions",
        metavar="REGION,...|none",
        section=ACCEPTED,
        help="Regions to take over; nothing moves by itself.",
    ),
    option("--network-id", **absent(NO_NETWORKS)),
)

ports = option(
    "-p",
    "--publish-port",
    "ports",
    multiple=True,
    type=PORT,
    metavar="PORT",
    section=SANDBOX,
    help="Make a port reachable from outside. Can be repeated.",
)
mounts = option(
    "--mount",
    "mounts",
    multiple=True,
    type=MOUNT,
    section=SANDBOX,
    help="Mount a drive: read-write (the default), or as it is now with mode 'snapshot'. Can be repeated.",
)
_size = options(
    option("--timeout", type=DURATION, section=SANDBOX, help="How long a session may live [default: 5m]"),
    option(
        "--vcpus",
        type=NUMBER,
        metavar="COUNT",
        section=SANDBOX,
        help="Processors: 1 or an even number, each with 2048 MB of memory [default: 2]",
    ),
    ports,
)
_tail = options(
    mounts,
    option(
        "--non-persistent",
        is_flag=True,
        section=SANDBOX,
        help="Forget all files when the session ends.",
    ),
)


def tags(*names: str) -> Any:
    return option(
        *names,
        "tags",
        multiple=True,
        type=TAG,
        section=SANDBOX,
        help="Label to find it by. Can be repeated.",
    )


def variables(section: str, help_text: str) -> Any:
    return option("-e", "--env", multiple=True, type=VARIABLE, section=section, help=help_text)


_origin = options(
    option(
        "--image",
        metavar="IMAGE",
        section=SANDBOX,
        help="What to start from: 'host', an OCI reference, or the name of an imported image.",
    ),
    option("--runtime", metavar="NAME", section=SANDBOX, help="A runtime by name, instead of an image."),
    option("-s", "--snapshot", metavar="SNAPSHOT_ID", section=SANDBOX, help="Start from a snapshot."),
)

DEFAULT_ENV: Final = "Variable for every process in it; KEY alone takes the value from here. Can be repeated."
new_sandbox = options(
    _origin,
    _size,
    variables(SANDBOX, DEFAULT_ENV),
    tags("-t", "--tag"),
    _tail,
    network,
    _snapshots,
    _elsewhere,
)
run_sandbox = options(_origin, _size, tags("--tag"), _tail, network, _snapshots, _elsewhere)
forked_sandbox = options(
    _size, variables(SANDBOX, DEFAULT_ENV), tags("-t", "--tag"), _tail, network, _snapshots, _elsewhere
)

how_to_run = options(
    option("-w", "--workdir", metavar="PATH", section=COMMAND, help="Where the command runs."),
    variables(COMMAND, "Variable for the command; KEY alone takes the value from here. Can be repeated."),
    option("--sudo", is_flag=True, section=COMMAND, help="Run the command as root of the sandbox."),
)
interactive = options(
    option(
        "-i",
        "--interactive",
        is_flag=True,
        section=COMMAND,
        help="Pass on what is typed; with a terminal here, the command gets one too.",
    ),
    option(
        "-t",
        "--tty",
        is_flag=True,
        section=COMMAND,
        help="Accepted for the sake of '-it': a terminal is used when there is one.",
    ),
)
extend = option(
    "--no-extend-timeout",
    is_flag=True,
    section=COMMAND,
    help="Let the session reach its timeout although a terminal is attached.",
)


def policy(values: Mapping[str, Any]) -> NetworkPolicy | None:
    """The network policy the options ask for; ``None`` when they say nothing about it."""
    mode = values.get("network_policy")
    domains, allowed, denied = (
        values.get(name, ()) for name in ("allowed_domain", "allowed_cidr", "denied_cidr")
    )
    if domains or allowed or denied:
        if mode is not None:
            raise click.UsageError(
                "--network-policy is everything or nothing; leave it out with --allowed-domain and the like"
            )
        return NetworkPolicy.custom(domains, allow_subnets=allowed, deny_subnets=denied)
    if mode is None:
        return None
    return NetworkPolicy.deny_all() if mode == "deny-all" else NetworkPolicy.allow_all()


def configuration(values: Mapping[str, Any]) -> NewConfiguration:
    """What the options say about a new sandbox, for the SDK. What was not given is left out."""
    found = cast("NewConfiguration", dict(changes(values)))
    if values.get("runtime") is not None:
        found["runtime"] = values["runtime"]
    if values.get("snapshot") is not None:
        found["source"] = SnapshotSource(values["snapshot"])
    return found


def changes(values: Mapping[str, Any]) -> Configuration:
    """The same for what a fork can have instead of what it would inherit."""
    found: Configuration = {}
    if values.get("image") is not None:
        found["image"] = values["image"]
    if values.get("snapshot_expiration") is not None:
        found["snapshot_expiration"] = values["snapshot_expiration"]
    if values.get("timeout") is not None:
        found["execution_time_limit"] = values["timeout"]
    if values.get("vcpus") is not None:
        found["resources"] = Resources(values["vcpus"])
    if values.get("ports"):
        found["ports"] = values["ports"]
    if values.get("env"):
        found["env"] = dict(values["env"])
    if values.get("tags"):
        found["tags"] = dict(values["tags"])
    if values.get("mounts"):
        found["mounts"] = dict(values["mounts"])
    if values.get("non_persistent"):
        found["persistent"] = False
    if (chosen := policy(values)) is not None:
        found["network_policy"] = chosen
    if (kept := retention(values)) is not None:
        found["snapshot_retention"] = kept
    return found


def retention(values: Mapping[str, Any]) -> SnapshotRetention | None:
    count = values.get("keep_last_snapshots")
    lifetime, evict = values.get("keep_last_snapshots_for"), values.get("delete_evicted_snapshots")
    if count is None:
        if lifetime is not None or evict is not None:
            raise click.UsageError("say how many with --keep-last-snapshots")
        return None
    return SnapshotRetention(count, lifetime, True if evict is None else evict)
