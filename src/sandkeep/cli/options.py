"""Options that several commands share, and their translation for the SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict, cast

import click

from sandkeep.cli.framework import absent, each_once, option, options
from sandkeep.cli.output import size
from sandkeep.cli.values import (
    CPUS,
    DURATION,
    HOST_PORT,
    LIFETIME,
    MEGABYTES,
    MOUNT,
    NUMBER,
    PORT,
    TAG,
    TRUTH,
    VARIABLE,
    NumberType,
)
from sandkeep.policy import NetworkPolicy
from sandkeep.spec import MAX_RETAINED, OPTIONS, HostPort, Resources, SnapshotRetention, SnapshotSource

if TYPE_CHECKING:
    from sandkeep.sdk.images import Pulled, PullPolicy
    from sandkeep.sync import Configuration, NewConfiguration

SANDBOX, NETWORK, SNAPSHOTS, ACCEPTED, COMMAND = (
    "Sandbox options",
    "Network options",
    "Snapshot options",
    "Accepted, without effect here",
    "Command options",
)


class Setting(NamedTuple):
    """A sandbox option of one plain value: its flag for new sandboxes, its command and row of ``config``."""

    name: str
    """The field of ``SandboxSpec``; flag and command have hyphens instead of underscores."""
    label: str
    """The name of its row in ``config list``."""
    kind: click.ParamType[Any]
    metavar: str
    flag: str
    """The help of the flag."""
    change: str
    """The help of the command that changes it."""
    value: str
    """The help of that command's argument."""
    section: str = SANDBOX

    @property
    def word(self) -> str:
        """Its name on a command line."""
        return self.name.replace("_", "-")

    @property
    def keyword(self) -> str:
        """Its name in the SDK."""
        return OPTIONS[self.name].keyword or self.name


SETTINGS: Final = (
    Setting(
        "timeout",
        label="Timeout",
        kind=DURATION,
        metavar="DURATION",
        flag="How long a session may live [default: 5m]",
        change="Change how long each new session may live.",
        value="Such as 30m or 2h.",
    ),
    Setting(
        "idle_timeout",
        label="Idle timeout",
        kind=LIFETIME,
        metavar="DURATION|none",
        flag="Stop a session that is unused for so long; none, the default, is never.",
        change="Change how long each new session may be unused before it is stopped.",
        value="Such as 30m; none is never.",
    ),
    Setting(
        "destroy_on_stop",
        label="Destroy on stop",
        kind=TRUTH,
        metavar="true|false",
        flag="Destroy the sandbox, with its snapshots, when its session ends for any reason.",
        change="Change whether the sandbox is destroyed when its session ends, the running one too.",
        value="Whether the server destroys it.",
    ),
    Setting(
        "delete_after",
        label="Delete after",
        kind=LIFETIME,
        metavar="DURATION|none",
        flag="Destroy the sandbox after so long, running or stopped; none, the default, is never.",
        change="Change how long from now the sandbox is destroyed, running or stopped.",
        value="Such as 12h; none is never.",
    ),
    Setting(
        "snapshot_expiration",
        label="Snapshot expiration",
        kind=LIFETIME,
        metavar="DURATION|none",
        flag="How long snapshots are kept; the current one never expires.",
        change="Change how long snapshots of a sandbox are kept. The current one never expires.",
        value="Such as 7d; none is for ever.",
        section=SNAPSHOTS,
    ),
)


def _typed(kind: click.ParamType[Any]) -> dict[str, Any]:
    return {"is_flag": True} if kind is TRUTH else {"type": kind}


def _settings(section: str) -> Any:
    """Return the flags of the plain options under a heading of the help text."""
    return options(
        *(
            option(f"--{each.word}", section=section, help=each.flag, **_typed(each.kind))
            for each in SETTINGS
            if each.section == section
        )
    )


network = options(
    option(
        "--network-policy",
        type=click.Choice(["allow-all", "deny-all"]),
        section=NETWORK,
        help="Allow all network access (the default) or none. To allow some, use the options below.",
    ),
    option(
        "--allowed-domain",
        multiple=True,
        metavar="DOMAIN",
        section=NETWORK,
        help="Allow this domain, and otherwise only what else is allowed; '*.example.com' is every name "
        "below it. Can be repeated.",
    ),
    option(
        "--allowed-cidr",
        multiple=True,
        metavar="CIDR",
        section=NETWORK,
        help="Allow these addresses, under any name. Can be repeated.",
    ),
    option(
        "--denied-cidr",
        multiple=True,
        metavar="CIDR",
        section=NETWORK,
        help="Deny these addresses, even if another option allows them. Can be repeated.",
    ),
)

_snapshots = options(
    _settings(SNAPSHOTS),
    option(
        "--keep-last-snapshots",
        type=NumberType(1, MAX_RETAINED),
        metavar="COUNT",
        section=SNAPSHOTS,
        help="Keep only this many snapshots, the newest.",
    ),
    option(
        "--keep-last-snapshots-for",
        type=LIFETIME,
        section=SNAPSHOTS,
        help="How long those snapshots are kept; the current one never expires.",
    ),
    option(
        "--delete-evicted-snapshots",
        type=TRUTH,
        section=SNAPSHOTS,
        help="Delete a snapshot when a newer one replaces it (the default), or let it expire.",
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
        help="Regions to fail over to; sandboxes do not move.",
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
host_ports = option(
    "--host-port",
    "host_ports",
    multiple=True,
    type=HOST_PORT,
    section=NETWORK,
    help="Let it reach this port of the server's machine by this name, under every network policy; none "
    "takes all away. Can be repeated.",
)
mounts = option(
    "--mount",
    "mounts",
    multiple=True,
    type=MOUNT,
    callback=each_once,
    section=SANDBOX,
    help="Mount a drive: read-write (the default), or with mode 'snapshot' the content that ended sessions "
    "left on it. Can be repeated.",
)


class Limit(NamedTuple):
    """A limit of a sandbox: its flag for new sandboxes, its command and row of ``config``."""

    word: str
    """Its name on a command line."""
    field: str
    """The field of `Resources`."""
    label: str
    """The name of its row in ``config list``."""
    kind: click.ParamType[Any]
    metavar: str
    flag: str
    """The help of the flag."""
    change: str
    """The help of the command that changes it."""
    value: str
    """The help of that command's argument."""
    unit: str = ""


LIMITS: Final = (
    Limit(
        "cpus",
        "cpus",
        label="CPUs",
        kind=CPUS,
        metavar="COUNT",
        flag="Processors, also parts of one, such as 0.5 [default: 2]",
        change="Change how many processors each new session has; other limits stay.",
        value="Such as 4 or 0.5",
    ),
    Limit(
        "memory",
        "memory_mb",
        label="Memory",
        kind=MEGABYTES,
        metavar="MB|SIZE",
        flag="Memory: a number of MB, or a size such as 512m or 2g [default: 4g]",
        change="Change how much memory each new session has; other limits stay.",
        value="Such as 512, which are MB, or 2g",
        unit=" MB",
    ),
    Limit(
        "disk",
        "disk_mb",
        label="Disk",
        kind=MEGABYTES,
        metavar="MB|SIZE",
        flag="Disk space for what a session writes: a number of MB, or a size such as 2g.",
        change="Change how much each new session may write; other limits stay.",
        value="Such as 512, which are MB, or 2g",
        unit=" MB",
    ),
    Limit(
        "pids",
        "pids",
        label="Processes",
        kind=NUMBER,
        metavar="COUNT",
        flag="How many processes and threads may exist at the same time.",
        change="Change how many processes each new session may have; other limits stay.",
        value="Such as 100",
    ),
)
VCPUS: Final = "'cpus' and 'memory' set the two independently"


def best_effort(**more: Any) -> Callable[[Any], Any]:
    """The flag beside limits that makes them a wish."""
    return option(
        "--best-effort",
        is_flag=True,
        help="Start also where the host cannot hold sessions to these limits.",
        **more,
    )


_size = options(
    _settings(SANDBOX),
    *(
        option(f"--{each.word}", type=each.kind, metavar=each.metavar, section=SANDBOX, help=each.flag)
        for each in LIMITS
    ),
    best_effort(section=SANDBOX),
    option("--vcpus", **absent(VCPUS)),
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
        callback=each_once,
        section=SANDBOX,
        help="Tag to find the sandbox by. Can be repeated.",
    )


def variables(section: str, help_text: str) -> Any:
    return option(
        "-e",
        "--env",
        multiple=True,
        type=VARIABLE,
        callback=each_once,
        section=section,
        help=help_text,
    )


_origin = options(
    option(
        "--image",
        metavar="IMAGE",
        section=SANDBOX,
        help="Image to start from: 'host', an OCI reference, or the name of an imported image.",
    ),
    option(
        "--pull",
        type=click.Choice(["missing", "always", "never"]),
        default="missing",
        section=SANDBOX,
        help="When to fetch the image from its registry [default: missing]",
    ),
    option(
        "--runtime",
        metavar="NAME",
        section=SANDBOX,
        help="A runtime by name and version, instead of an image.",
    ),
    option("-s", "--snapshot", metavar="SNAPSHOT_ID", section=SANDBOX, help="Start from a snapshot."),
)

DEFAULT_ENV: Final = "Variable for all its processes; KEY alone copies the local value. Can be repeated."
_reach = options(network, host_ports)
new_sandbox = options(
    _origin,
    _size,
    variables(SANDBOX, DEFAULT_ENV),
    tags("-t", "--tag"),
    _tail,
    _reach,
    _snapshots,
    _elsewhere,
)
run_sandbox = options(_origin, _size, tags("--tag"), _tail, _reach, _snapshots, _elsewhere)
shell_sandbox = options(_origin, _size, tags("-t", "--tag"), _tail, _reach, _snapshots, _elsewhere)
forked_sandbox = options(
    _size,
    variables(SANDBOX, DEFAULT_ENV),
    tags("-t", "--tag"),
    _tail,
    _reach,
    _snapshots,
    _elsewhere,
)

how_to_run = options(
    option("-w", "--workdir", metavar="PATH", section=COMMAND, help="Working directory of the command."),
    variables(COMMAND, "Variable for the command; KEY alone copies the local value. Can be repeated."),
    option(
        "--secret",
        "secrets",
        multiple=True,
        type=TAG,
        metavar="VARIABLE=NAME",
        callback=each_once,
        section=COMMAND,
        help="Variable for the command with the value of a secret. Can be repeated.",
    ),
    option(
        "--unset",
        multiple=True,
        metavar="KEY",
        section=COMMAND,
        help="Variable of the sandbox that the command does not get. Can be repeated.",
    ),
    option("--sudo", is_flag=True, section=COMMAND, help="Run the command as root of the sandbox."),
)
metadata = option(
    "--metadata",
    multiple=True,
    type=TAG,
    callback=each_once,
    section=COMMAND,
    help="Note for the record of the command, as 'sandkeep ps --json' shows it. Can be repeated.",
)
interactive = options(
    option(
        "-i",
        "--interactive",
        is_flag=True,
        section=COMMAND,
        help="Pass standard input on; if it is a terminal, the command gets one too.",
    ),
    option(
        "-t",
        "--tty",
        is_flag=True,
        section=COMMAND,
        help="Accepted so that '-it' works: a terminal is used if there is one.",
    ),
)
detachable = option(
    "--detachable",
    is_flag=True,
    section=COMMAND,
    help="On a terminal: let the command run on when this one is lost, or Ctrl-P Ctrl-Q is typed; 'sandkeep "
    "attach' attaches to it again.",
)
extend = option(
    "--no-extend-timeout",
    is_flag=True,
    section=COMMAND,
    help="Let the session time out even while a terminal is attached.",
)


def policy(values: Mapping[str, Any]) -> NetworkPolicy | None:
    """Return the network policy that the options set; ``None`` if they set none."""
    mode = values.get("network_policy")
    domains, allowed, denied = (
        values.get(name, ()) for name in ("allowed_domain", "allowed_cidr", "denied_cidr")
    )
    if domains or allowed or denied:
        if mode is not None:
            raise click.UsageError(
                "--network-policy allows all or nothing; leave it out with --allowed-domain and the like"
            )
        return NetworkPolicy.custom(domains, allow_subnets=allowed, deny_subnets=denied)
    if mode is None:
        return None
    return NetworkPolicy.deny_all() if mode == "deny-all" else NetworkPolicy.allow_all()


class Pulling(TypedDict):
    """Arguments of a creation about its image."""

    pull: PullPolicy
    on_pull: Callable[[Pulled], object]


def pulling(values: Mapping[str, Any]) -> Pulling:
    """Return when to fetch the image of a new sandbox, and what shows how far that is."""
    parts: dict[str, tuple[int, int]] = {}

    def log(at: Pulled) -> None:
        import logging

        parts[at.part] = (at.done, at.total)
        done, total = (size(sum(each)) for each in zip(*parts.values(), strict=True))
        logging.getLogger("sandkeep").info("pulling %s, %s of %s", values.get("image"), done, total)

    return {"pull": values.get("pull") or "missing", "on_pull": log}


def configuration(values: Mapping[str, Any]) -> NewConfiguration:
    """Return the configuration of a new sandbox for the SDK, with the options that were given."""
    found = cast("NewConfiguration", dict(changes(values)))
    if values.get("runtime") is not None:
        found["runtime"] = values["runtime"]
    if values.get("snapshot") is not None:
        found["source"] = SnapshotSource(values["snapshot"])
    return found


def changes(values: Mapping[str, Any]) -> Configuration:
    """Return the configuration that a fork has instead of what it would inherit."""
    found: Configuration = {}
    if values.get("image") is not None:
        found["image"] = values["image"]
    plain = {
        each.keyword: values[each.name] for each in SETTINGS if values.get(each.name) not in (None, False)
    }
    found |= cast("Configuration", plain)
    if (limits := resources(values)) is not None:
        found["resources"] = limits
    if values.get("ports"):
        found["ports"] = values["ports"]
    if values.get("host_ports"):
        found["host_ports"] = granted(values["host_ports"])
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


def resources(values: Mapping[str, Any]) -> Resources | None:
    """Return the limits that the options set; ``None`` if they set none."""
    asked = {each.field: values[each.word] for each in LIMITS if values.get(each.word) is not None}
    if not asked:
        if values.get("best_effort"):
            flags = ", ".join(f"--{each.word}" for each in LIMITS)
            raise click.UsageError(f"--best-effort is about limits: give one of {flags}")
        return None
    return Resources(**asked, exact=not values.get("best_effort"))


def granted(values: Sequence[HostPort | None]) -> tuple[HostPort, ...]:
    """Return the ports of the server's machine that the option names; with ``none`` there are none."""
    if None in values and len(values) > 1:
        raise click.UsageError("--host-port none takes all ports of the host away; leave the others out")
    return tuple(each for each in values if each is not None)


def retention(values: Mapping[str, Any]) -> SnapshotRetention | None:
    count = values.get("keep_last_snapshots")
    lifetime, evict = values.get("keep_last_snapshots_for"), values.get("delete_evicted_snapshots")
    if count is None:
        if lifetime is not None or evict is not None:
            raise click.UsageError("give their number with --keep-last-snapshots")
        return None
    return SnapshotRetention(count, lifetime, True if evict is None else evict)
