"""Every place that spells an option out has each one that `sandkeep.spec` describes.

A test that fails names the option and the place that lacks it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

import click
import msgspec
import pytest

from sandkeep import sync
from sandkeep.cli import options as cli_options
from sandkeep.cli import present
from sandkeep.cli.commands import config as config_commands
from sandkeep.engine import configuration
from sandkeep.host.driver import ProcessSpec
from sandkeep.policy import NetworkPolicy
from sandkeep.process_options import PROCESS_OPTIONS, ProcessOption, ProcessOptions
from sandkeep.sdk import bodies as sdk_bodies
from sandkeep.sdk.sandboxes import (
    Configuration,
    ConfigurationChanges,
    NewConfiguration,
    SandboxInfo,
    SandboxState,
)
from sandkeep.spec import (
    OPTIONS,
    GitSource,
    HostPort,
    Mount,
    Option,
    Resources,
    SandboxSpec,
    SnapshotRetention,
)
from sandkeep.states import MountMode, Paths, SessionStatus
from sandkeep.store.migrations import migrate
from sandkeep.store.rows import Sandbox, SandboxChanges, Session
from sandkeep.store.sqlite import SqliteDatabase
from sandkeep.wire.base import decode, encode
from sandkeep.wire.bodies import CreateBody, ForkBody, RunBody, UpdateBody
from sandkeep.wire.objects import SandboxObject, spec_fields
from sandkeep.wire.terminal import Start, read_message

SAMPLES: dict[str, Any] = {
    "name": "sample",
    "source": GitSource("https://example.com/code.git", depth=1),
    "image": "debian:12",
    "runtime": "python3.13",
    "ports": (3000, 8080),
    "host_ports": (HostPort(8000, "model.internal"), HostPort(5432, "db")),
    "timeout": timedelta(minutes=7),
    "idle_timeout": timedelta(minutes=3),
    "resources": Resources(0.5, 256, 1024, 100),
    "persistent": False,
    "destroy_on_stop": True,
    "delete_after": timedelta(hours=12),
    "network_policy": NetworkPolicy.deny_all(),
    "network_id": "net",
    "env": {"A": "b"},
    "tags": {"team": "x"},
    "mounts": {"/data": Mount("cache", MountMode.SNAPSHOT)},
    "snapshot_expiration": timedelta(days=2),
    "retention": SnapshotRetention(3, timedelta(days=1), False),
    "region": "fra1",
    "failover_regions": ("cdg1",),
    "interactive": True,
    "paths": Paths.SANDKEEP,
}
"""A value of each option that is not its default."""

ALL = list(OPTIONS.items())
EACH = pytest.mark.parametrize(("name", "option"), ALL, ids=[name for name, _ in ALL])


def lacking(place: object, wanted: Iterable[str | None], found: Iterable[str]) -> None:
    missing = {name for name in wanted if name is not None} - set(found)
    assert not missing, f"{place} lacks {', '.join(sorted(missing))}"


def test_every_option_has_a_sample() -> None:
    lacking(f"SAMPLES of {__name__}", OPTIONS, SAMPLES)
    assert OPTIONS.keys() == {each.name for each in dataclasses.fields(SandboxSpec)}


@EACH
def test_request_bodies(name: str, option: Option) -> None:
    lacking(CreateBody, [option.body], CreateBody.__struct_fields__)
    if name not in ("source", "runtime", "paths"):  # what a fork's source decides
        lacking(ForkBody, [option.body], ForkBody.__struct_fields__)
    if option.update is not None:
        lacking(UpdateBody, [option.body], UpdateBody.__struct_fields__)
    else:
        assert option.body not in UpdateBody.__struct_fields__


@EACH
def test_responses(name: str, option: Option) -> None:
    lacking(SandboxObject, option.shown, SandboxObject.__struct_fields__)


@EACH
def test_columns(name: str, option: Option) -> None:
    lacking(Sandbox, option.columns, (each.name for each in dataclasses.fields(Sandbox)))
    if option.of_session:
        lacking(Session, option.session_columns, (each.name for each in dataclasses.fields(Session)))
    if option.update is not None:
        lacking(SandboxChanges, option.columns, get_type_hints(SandboxChanges))


def test_the_schema_has_the_columns(tmp_path: Path) -> None:
    db = SqliteDatabase(str(tmp_path / "store.db"))
    migrate(db, now_ms=0)
    for table, wanted in (
        ("sandboxes", [c for option in OPTIONS.values() for c in option.columns]),
        ("sessions", [c for option in OPTIONS.values() for c in option.session_columns]),
    ):
        lacking(f"table {table}", wanted, (str(row[1]) for row in db.all(f"PRAGMA table_info({table})")))
    db.close()


@EACH
def test_keywords_of_the_sdk(name: str, option: Option) -> None:
    if option.keyword is None or name == "name":  # an argument of its own
        return
    lacking(NewConfiguration, [option.keyword], get_type_hints(NewConfiguration))
    if option.inherited or name == "mounts":
        lacking(Configuration, [option.keyword], {*get_type_hints(Configuration), "runtime"})
    if option.update is not None:
        lacking(ConfigurationChanges, [option.keyword], {*get_type_hints(ConfigurationChanges), "runtime"})


def shown_sandbox() -> SandboxInfo:
    shown = SandboxObject(
        name="n",
        current_session_id="s",
        status=SessionStatus.RUNNING,
        persistent=True,
        created_at=0,
        updated_at=0,
    )
    return SandboxInfo.of(shown)


def snake(name: str) -> str:
    return re.sub("([A-Z])", r"_\1", name).lower()


@EACH
def test_what_a_handle_and_a_listing_show(name: str, option: Option) -> None:
    if option.keyword is None or not option.shown:
        return
    lacking(SandboxInfo, [option.keyword], (each.name for each in dataclasses.fields(SandboxInfo)))
    lacking(SandboxState, [option.keyword], vars(SandboxState))
    assert vars(SandboxState)[option.keyword].__doc__, f"SandboxState.{option.keyword} has no docstring"
    lacking(
        "cli.present.sandbox", [option.keyword], (snake(name) for name in present.sandbox(shown_sandbox()))
    )


def parameters(decorate: Callable[[Any], Any]) -> set[str]:
    def function() -> None: ...

    return {str(each.name) for each in decorate(function).__click_params__}


@EACH
def test_options_of_the_command_line(name: str, option: Option) -> None:
    lacking("cli.options.new_sandbox", option.cli, parameters(cli_options.new_sandbox))
    if option.inherited and name not in ("image", "runtime"):
        lacking("cli.options.forked_sandbox", option.cli, parameters(cli_options.forked_sandbox))
    if option.update is not None and option.keyword is not None and option.cli and name != "runtime":
        context = click.Context(config_commands.config)
        command = {"non_persistent": "persistent"}.get(option.cli[0], option.cli[0]).replace("_", "-")
        lacking("cli.config", [command], config_commands.config.list_commands(context))


def spec(name: str) -> SandboxSpec:
    return SandboxSpec(**{name: SAMPLES[name]})


@EACH
def test_a_value_goes_from_the_sdk_to_the_engine(name: str, option: Option) -> None:
    """By the SDK's request, the wire and the body as the server reads it."""
    if option.keyword is None:
        return
    sent = sdk_bodies.configuration(**{option.keyword: SAMPLES[name]})
    read = decode(CreateBody, encode({"projectId": "p", **sent}))
    assert read.spec() == spec(name)
    if option.update is not None and name != "runtime":
        changes = decode(UpdateBody, encode(sdk_bodies.changes(**{option.keyword: SAMPLES[name]})))
        assert changes.changes() == {name: getattr(spec(name), name)}


@EACH
def test_a_value_is_stored_and_found_again(name: str, option: Option) -> None:
    columns = configuration.columns(spec(name))
    assert set(columns) >= set(option.columns) or name in ("name", "source", "image", "network_policy")
    row = Sandbox(
        id="box",
        project="p",
        name="n",
        status=SessionStatus.RUNNING,
        status_updated_ms=0,
        created_ms=0,
        updated_ms=0,
        image="host",
        cwd="/",
        **columns,
    )
    found = configuration.fields(row)
    if name in found:
        assert SandboxSpec(**found) == spec(name)
    if option.of_session and name != "image":
        assert set(option.session_columns) == set(option.columns) - set(option.sandbox_only)
        assert set(option.session_columns) <= configuration.of_session(row).keys()


@EACH
def test_a_value_is_shown(name: str, option: Option) -> None:
    shown = spec_fields(spec(name))
    if name not in ("name", "image"):
        lacking("wire.objects.spec_fields", option.shown, shown)
    msgspec.json.encode(shown)


@EACH
def test_a_fork_inherits_an_option_unless_its_description_says_otherwise(name: str, option: Option) -> None:
    assert (name not in ForkBody().changes()) == option.inherited


def test_zero_takes_an_idle_timeout_away() -> None:
    sent = sdk_bodies.changes(idle_timeout=0)
    assert sent == {"idleTimeout": 0}
    assert decode(UpdateBody, encode(sent)).changes() == {"idle_timeout": None}
    assert SandboxSpec(idle_timeout=timedelta(0)).idle_timeout is None


def test_only_what_can_be_changed_is_taken_by_update() -> None:
    with pytest.raises(TypeError, match="image"):
        sdk_bodies.changes(image="debian:12")
    assert "changes" in inspect.signature(sync.Sandbox.update).parameters


PROCESS = list(PROCESS_OPTIONS.items())


@pytest.mark.parametrize(("name", "option"), PROCESS, ids=[name for name, _ in PROCESS])
def test_options_of_processes(name: str, option: ProcessOption) -> None:
    lacking(RunBody, [option.body], RunBody.__struct_fields__)
    lacking(ProcessSpec, [option.host], (each.name for each in dataclasses.fields(ProcessSpec)))
    for call in (sync.Sandbox.create_process, sync.Sandbox.run_process):
        # ``run_process`` gives standard input as a value.
        words = {
            *inspect.signature(call).parameters,
            *(["stdin"] if call is sync.Sandbox.run_process else []),
        }
        lacking(call, [option.keyword], words)


def test_a_process_goes_from_the_sdk_to_the_engine() -> None:
    sent = sdk_bodies.process(
        "make",
        ["-j"],
        cwd="/src",
        env={"A": "b", "B": None},
        secrets={"KEY": "openai"},
        sudo=True,
        user=None,
        kill_after=2,
        stdin=True,
        stderr="stdout",
        grace=1,
        metadata={"step": "3"},
    )
    assert decode(RunBody, encode(sent)).options() == ProcessOptions(
        command="make",
        args=["-j"],
        cwd="/src",
        env={"A": "b", "B": None},
        secrets={"KEY": "openai"},
        root=True,
        stdin=True,
        stderr="stdout",
        kill_after_ms=2000,
        grace_ms=1000,
        metadata={"step": "3"},
    )
    assert decode(RunBody, b'{"command": "true", "user": "amy"}').options() == ProcessOptions(
        command="true", args=[], user="amy"
    )


def test_a_program_on_a_terminal_has_the_same_options() -> None:
    sent = sdk_bodies.terminal(
        "top",
        (),
        cwd="/",
        env={"TERM": "vt100", "B": None},
        secrets={"KEY": "openai"},
        columns=100,
        rows=30,
        kill_after=1,
        detachable=True,
        metadata={"step": "3"},
    )
    start = read_message(encode(sent))
    assert isinstance(start, Start) and start.detachable
    assert start.options("amy") == ProcessOptions(
        command="top",
        args=[],
        cwd="/",
        env={"TERM": "vt100", "B": None},
        secrets={"KEY": "openai"},
        user="amy",
        pty=(30, 100),
        kill_after_ms=1000,
        metadata={"step": "3"},
    )
