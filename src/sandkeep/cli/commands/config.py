"""``sandkeep config``: the configuration of a sandbox, one command for each field that can be changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli import options, present
from sandkeep.cli.app import App
from sandkeep.cli.framework import Group, argument, command, option, sandbox_argument
from sandkeep.cli.output import lifetime, pairs
from sandkeep.cli.values import LIFETIME, NONE, TRUTH, NumberType, OrNoneType
from sandkeep.spec import MAX_RETAINED, HostPort, Mount, Resources, SnapshotRetention

if TYPE_CHECKING:
    from sandkeep.sync import Sandbox

config = Group(
    "config",
    "Show and change the configuration of a sandbox. Changes apply from its next session on.",
    absent={
        "region": options.ONE_PLACE,
        "failover-regions": options.ONE_PLACE,
        "network-id": options.NO_NETWORKS,
        "vcpus": options.VCPUS,
    },
)


@command("list")
@sandbox_argument()
def list_(app: App, name: str) -> None:
    """Show the configuration of a sandbox."""
    box = app.sandbox(name)
    if app.json:
        app.out.json(present.sandbox(box, routes=True))
        return
    app.out.table(("FIELD", "VALUE"), _rows(box))


def _rows(box: Sandbox) -> list[tuple[str, str]]:
    kept = box.snapshot_retention
    retention = "-"
    if kept is not None:
        evicted = "" if kept.delete_evicted else ", evicted ones expire"
        retention = f"{kept.count}, for {lifetime(kept.expiration)}{evicted}"
    mounts = {path: f"{mount.drive} ({mount.mode.value})" for path, mount in box.mounts.items()}
    return [
        ("Name", box.name),
        ("Status", box.status.value),
        ("Image", box.image or box.runtime or "-"),
        *_limits(box.resources),
        *_settings(box, options.SANDBOX),
        ("Persistent", "true" if box.persistent else "false"),
        ("Network policy", present.policy(box.network_policy)),
        ("Host ports", ", ".join(f"{each.port} as {each.name}" for each in box.host_ports) or "-"),
        ("Ports", ", ".join(f"{route.port} ({route.link})" for route in box.routes) or "-"),
        *_settings(box, options.SNAPSHOTS),
        ("Keep last snapshots", retention),
        ("Current snapshot", box.current_snapshot_id or "-"),
        ("Tags", pairs(box.tags)),
        ("Mounts", pairs(mounts)),
        ("Used so far", present.usage(box.usage)),
    ]


def _limits(found: Resources) -> list[tuple[str, str]]:
    """Return the rows of the limits."""
    rows: list[tuple[str, str]] = []
    for each in options.LIMITS:
        value = getattr(found, each.field)
        rows.append((each.label, "-" if value is None else f"{value}{each.unit}"))
    return rows


def _settings(box: Sandbox, section: str) -> list[tuple[str, str]]:
    """Return the rows of the plain options under a heading."""
    return [
        (each.label, _text(getattr(box, each.keyword)))
        for each in options.SETTINGS
        if each.section == section
    ]


def _text(value: bool | timedelta | None) -> str:
    return str(value).lower() if isinstance(value, bool) else lifetime(value)


config.add_command(list_)


def _changing(
    name: str, *decorators: Callable[[Any], Any]
) -> Callable[[Callable[..., dict[str, Any]]], click.Command]:
    """Make a command that changes one field: its function returns the arguments of ``update``."""

    def make(function: Callable[..., dict[str, Any]]) -> click.Command:
        def change(app: App, name: str, **values: Any) -> None:
            box = app.sandbox(name)
            box.update(**function(box, **values))
            _changed(app, box)

        change.__doc__ = function.__doc__
        for decorator in reversed((sandbox_argument(), *decorators)):
            change = decorator(change)
        made = command(name)(change)
        config.add_command(made)
        return made

    return make


def _changed(app: App, box: Sandbox) -> None:
    if app.json:
        app.out.json(present.sandbox(box, routes=True))
    else:
        app.note(f"{box.name} is changed; 'sandkeep config list {box.name}' shows the configuration")


def value(kind: Any, metavar: str, help_text: str) -> Callable[[Any], Any]:
    return argument("value", type=kind, metavar=metavar, help=help_text)


def _change_limit(limit: options.Limit) -> None:
    """Add the command that changes one limit and keeps the others."""

    def change(box: Sandbox, value: Any, best_effort: bool) -> dict[str, Any]:
        asked: dict[str, Any] = {**box.resources.asked, limit.field: value}
        if value == NONE:
            del asked[limit.field]
        return {"resources": Resources(**asked, exact=not best_effort)}

    change.__doc__ = limit.change
    kind, metavar = OrNoneType(limit.kind), f"{limit.metavar}|none"
    about = f"{limit.value}; none: as the server has it by default."
    _changing(limit.word, value(kind, metavar, about), options.best_effort())(change)


for _limit in options.LIMITS:
    _change_limit(_limit)


def _change_setting(setting: options.Setting) -> None:
    """Add the command that changes a plain option."""

    def change(box: Sandbox, value: Any) -> dict[str, Any]:
        return {setting.keyword: value}

    change.__doc__ = setting.change
    _changing(setting.word, value(setting.kind, setting.metavar, setting.value))(change)


for _setting in options.SETTINGS:
    _change_setting(_setting)


@_changing("persistent", value(TRUTH, "true|false", "Whether files are kept."))
def persistent(box: Sandbox, value: bool) -> dict[str, Any]:
    """Keep the files between sessions, or discard them.

    With ``false`` the files of the running session are still kept when it stops, and those of later ones
    are not. With ``true`` they are kept from now on.
    """
    return {"persistent": value}


@_changing(
    "network-policy",
    options.network,
    option(
        "--mode",
        type=click.Choice(["allow-all", "deny-all"]),
        section=options.NETWORK,
        help="The same as --network-policy.",
    ),
)
def network_policy(box: Sandbox, mode: str | None, **values: Any) -> dict[str, Any]:
    """Change which network access a sandbox has, at once. Replaces the whole policy."""
    if mode is not None:
        if values["network_policy"] not in (None, mode):
            raise click.UsageError("--mode and --network-policy are the same")
        values["network_policy"] = mode
    chosen = options.policy(values)
    if chosen is None:
        raise click.UsageError("an option is missing: --network-policy, --allowed-domain, --allowed-cidr …")
    return {"network_policy": chosen}


@_changing("ports", options.ports)
def ports(box: Sandbox, ports: tuple[int, ...]) -> dict[str, Any]:
    """Change which ports are reachable from outside. Replaces all ports; without any, closes all."""
    return {"ports": ports}


@_changing("host-ports", options.host_ports)
def host_ports(box: Sandbox, host_ports: tuple[HostPort | None, ...]) -> dict[str, Any]:
    """Change which ports of the server's machine it reaches, at once. Replaces all; without any, none."""
    return {"host_ports": options.granted(host_ports)}


@_changing("tags", options.tags("-t", "--tag"))
def tags(box: Sandbox, tags: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Change the tags of a sandbox. Replaces all tags; without any, removes all."""
    return {"tags": dict(tags)}


@_changing("env", options.variables(options.SANDBOX, options.DEFAULT_ENV))
def env(box: Sandbox, env: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Change the variables of all processes. Replaces all variables; without any, removes all."""
    return {"env": dict(env)}


@_changing("mounts", options.mounts)
def mounts(box: Sandbox, mounts: tuple[tuple[str, Mount], ...]) -> dict[str, Any]:
    """Change which drives are mounted. Replaces all mounts; without any, removes all."""
    return {"mounts": dict(mounts)}


@_changing(
    "keep-last-snapshots",
    value(NumberType(0, MAX_RETAINED), "COUNT", "How many; 0 keeps all."),
)
def keep_last_snapshots(box: Sandbox, value: int) -> dict[str, Any]:
    """Keep only the newest snapshots of a sandbox."""
    kept = box.snapshot_retention
    if value == 0:
        return {"snapshot_retention": None}
    return {"snapshot_retention": SnapshotRetention(value) if kept is None else replace(kept, count=value)}


@_changing("keep-last-snapshots-for", value(LIFETIME, "DURATION|none", "Such as 30d; none is for ever."))
def keep_last_snapshots_for(box: Sandbox, value: timedelta) -> dict[str, Any]:
    """Change how long the newest snapshots are kept. The current one never expires."""
    return {"snapshot_retention": replace(_kept(box), expiration=value)}


@_changing("delete-evicted-snapshots", value(TRUTH, "true|false", "Delete, or let them expire."))
def delete_evicted_snapshots(box: Sandbox, value: bool) -> dict[str, Any]:
    """Delete snapshots when newer ones replace them, or let them expire."""
    return {"snapshot_retention": replace(_kept(box), delete_evicted=value)}


def _kept(box: Sandbox) -> SnapshotRetention:
    if box.snapshot_retention is None:
        raise click.UsageError(
            f"{box.name} keeps all snapshots: use 'sandkeep config keep-last-snapshots' first"
        )
    return box.snapshot_retention


@command("current-snapshot")
@sandbox_argument()
@argument("snapshot", metavar="SNAPSHOT_ID", help="Snapshot that the next session starts from.")
def current_snapshot(app: App, name: str, snapshot: str) -> None:
    """Let the next session start from another snapshot; the same as 'sandkeep rollback'."""
    from sandkeep.cli.commands.snapshots import go_back

    _changed(app, go_back(app, name, snapshot))


config.add_command(current_snapshot)
