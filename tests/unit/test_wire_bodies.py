"""Requests are read strictly where it matters, leniently where clients differ, and errors name the field."""

from __future__ import annotations

import dataclasses
import errno
import json
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from sandkeep import policy_json
from sandkeep.errors import InvalidRequest
from sandkeep.policy import NetworkPolicy
from sandkeep.spec import (
    GitSource,
    Mount,
    Resources,
    SandboxSpec,
    SnapshotRetention,
    SnapshotSource,
    TarballSource,
)
from sandkeep.states import MountMode, SandboxSort, SortOrder
from sandkeep.wire import bodies, policies, queries, terminal
from sandkeep.wire.base import convert, decode
from sandkeep.wire.errors import spelled
from sandkeep.wire.paths import ReadBody


def create(**body: Any) -> SandboxSpec:
    return decode(bodies.CreateBody, json.dumps({"projectId": "P", **body}).encode()).spec()


def test_the_smallest_create_means_the_defaults() -> None:
    assert create() == SandboxSpec()
    assert create(ports=[], name="a") == SandboxSpec(name="a")


def test_each_limit_can_be_asked_for_alone() -> None:
    for limit in ({"cpus": 0.5}, {"memory_mb": 256}, {"disk_mb": 1024}, {"pids": 100}):
        [(name, value)] = limit.items()
        word = {"memory_mb": "memoryMb", "disk_mb": "diskMb"}.get(name, name)
        found = create(resources={word: value}).resources
        assert found == Resources(**limit) and found.asked == limit
    assert create(resources={"exact": True}).resources.asked == {}


def test_a_full_create_arrives_in_full() -> None:
    spec = create(
        name="a",
        source={"type": "git", "url": "https://h/r", "depth": 1, "revision": "main", "username": "u"},
        ports=[3000],
        timeout=120000,
        resources={"vcpus": 4, "memory": 8192},
        image="vercel/sandbox/node:24",
        persistent=False,
        networkPolicy={"mode": "deny-all"},
        networkId="net",
        env={"A": "1"},
        tags={"t": "2:3"},
        mounts={"/data": {"drive": "d", "mode": "snapshot"}, "/rw": {"drive": "d"}},
        snapshotExpiration=0,
        keepLastSnapshots={"count": 3, "expiration": 86400000, "deleteEvicted": False},
        region="sfo1",
        failoverRegions=["iad1"],
        __interactive=True,
    )
    assert spec == SandboxSpec(
        name="a",
        source=GitSource("https://h/r", depth=1, revision="main", username="u"),
        ports=(3000,),
        timeout=timedelta(minutes=2),
        resources=Resources(4, 8192),
        image="vercel/sandbox/node:24",
        persistent=False,
        network_policy=NetworkPolicy.deny_all(),
        network_id="net",
        env={"A": "1"},
        tags={"t": "2:3"},
        mounts={"/data": Mount("d", MountMode.SNAPSHOT), "/rw": Mount("d")},
        snapshot_expiration=timedelta(0),
        retention=SnapshotRetention(3, timedelta(days=1), delete_evicted=False),
        region="sfo1",
        failover_regions=("iad1",),
        interactive=True,
    )


def test_every_kind_of_source() -> None:
    assert create(source={"type": "tarball", "url": "https://h/a.tgz"}).source == TarballSource(
        "https://h/a.tgz"
    )
    assert create(source={"type": "snapshot", "snapshotId": "snap_1"}).source == SnapshotSource("snap_1")


def test_the_older_route_means_a_runtime_unless_something_else_is_named() -> None:
    def runtime(**body: Any) -> str | None:
        data = json.dumps({"projectId": "P", **body}).encode()
        return decode(bodies.CreateBody, data).spec(legacy=True).runtime

    assert runtime() == "node24"
    assert runtime(source={"type": "git", "url": "https://h/r"}) == "node24"
    assert runtime(runtime="python3.13") == "python3.13"
    assert runtime(image="ubuntu") is None
    assert runtime(source={"type": "snapshot", "snapshotId": "snap_1"}) is None


def test_unknown_keys_are_ignored_private_ones_too() -> None:
    assert create(__includeSystemRoutes=True, whatever={"deep": [1]}) == SandboxSpec()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"ports": ["x"]}, "ports[0]"),
        ({"ports": [0]}, "ports[0]"),
        ({"ports": [10**30]}, "ports[0]"),
        ({"timeout": 1.5}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": 2**53 - 1}, "timeout"),
        ({"timeout": "5m"}, "timeout"),
        ({"name": None}, "name"),
        ({"name": "drives"}, "name"),
        ({"resources": {"vcpus": 3}}, "resources.vcpus"),
        ({"resources": {"vcpus": 2, "memory": 1}}, "resources.memory"),
        ({"resources": {"memory": 512}}, "resources.vcpus"),
        ({"resources": {"vcpus": 2, "pids": 100}}, "resources.vcpus"),
        ({"resources": {"memory": 4096, "cpus": 2}}, "resources.memory"),
        ({"resources": {"cpus": 0}}, "resources.cpus"),
        ({"resources": {"cpus": "2"}}, "resources.cpus"),
        ({"resources": {"memoryMb": 63}}, "resources.memoryMb"),
        ({"resources": {"diskMb": 0}}, "resources.diskMb"),
        ({"resources": {"pids": 1.5}}, "resources.pids"),
        ({"runtime": "node24", "image": "x"}, "runtime"),
        ({"env": {"A": 1}}, "env[...]"),
        ({"env": {"A=": "1"}}, 'env["A="]'),
        ({"tags": {str(n): "" for n in range(65)}}, "tags"),
        ({"source": {"type": "zip"}}, "source.type"),
        ({"source": {"type": "git"}}, "source.url"),
        ({"source": {"type": "git", "url": "https://h/r", "depth": 0}}, "source.depth"),
        ({"source": {"type": "snapshot", "snapshotId": "a/b"}}, "source.snapshotId"),
        ({"mounts": {"/a": {"drive": "d", "mode": "read-only"}}}, "mounts[...].mode"),
        ({"mounts": {"/a": {"drive": "a/b"}}}, 'mounts["/a"].drive'),
        ({"mounts": {"a": {"drive": "d"}}}, 'mounts["a"]'),
        ({"keepLastSnapshots": {"count": 0}}, "keepLastSnapshots.count"),
        ({"keepLastSnapshots": None}, "keepLastSnapshots"),
        ({"region": "iad1", "failoverRegions": ["iad1"]}, "failoverRegions[0]"),
        ({"networkPolicy": {"mode": "some"}}, "networkPolicy.mode"),
        ({"networkPolicy": {"allow": ["a..b"]}}, 'networkPolicy.allow["a..b"]'),
        ({"networkPolicy": {"subnets": {"deny": ["x"]}}}, "networkPolicy.subnets.deny[0]"),
    ],
)
def test_a_bad_create_names_the_field_as_the_client_wrote_it(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        create(**body)
    assert spelled(caught.value.field) == field


@pytest.mark.parametrize(
    "data", [b"[", b"[]", b"nope", b'"\xff"', b"[" * 100_000, b'{"projectId":"\\ud800"}']
)
def test_what_is_not_a_json_object_is_the_callers_mistake(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(bodies.CreateBody, data)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="projectId: is required"):
        decode(bodies.CreateBody, b"{}")


@pytest.mark.parametrize("data", [b"", b"  \n", b"{}"])
def test_no_body_at_all_is_an_empty_object(data: bytes) -> None:
    assert decode(bodies.SnapshotBody, data) == bodies.SnapshotBody()


def test_an_update_tells_absent_from_null_and_from_empty() -> None:
    def changes(text: str) -> dict[str, Any]:
        return decode(bodies.UpdateBody, text.encode()).changes()

    assert changes("{}") == {}
    assert changes('{"networkId":null,"keepLastSnapshots":null,"failoverRegions":[],"mounts":{}}') == {
        "network_id": None,
        "retention": None,
        "failover_regions": (),
        "mounts": {},
    }
    assert changes('{"env":{},"tags":{},"ports":[]}') == {"env": {}, "tags": {}, "ports": ()}
    assert changes('{"resources":{"vcpus":4,"memory":8192},"timeout":300000}') == {
        "resources": Resources(4, 8192),
        "timeout": timedelta(minutes=5),
    }
    for field in ("persistent", "resources", "tags", "timeout", "currentSnapshotId", "region"):
        with pytest.raises(InvalidRequest, match=field):
            changes(json.dumps({field: None}))


def test_the_current_snapshot_is_not_configuration() -> None:
    body = decode(bodies.UpdateBody, b'{"currentSnapshotId":"snap_1"}')
    assert (body.current_snapshot_id, body.changes()) == ("snap_1", {})


def test_a_fork_inherits_what_it_does_not_replace_but_never_mounts() -> None:
    source = SandboxSpec(name="a", env={"A": "1"}, tags={"t": "1"}, ports=(80,), mounts={"/d": Mount("d")})
    body = decode(bodies.ForkBody, b'{"name":"f","tags":{"u":"2"},"__interactive":true}')
    assert dataclasses.replace(source, **body.changes()) == SandboxSpec(
        name="f", env={"A": "1"}, tags={"u": "2"}, ports=(80,), interactive=True
    )


def test_a_run_in_the_spelling_of_each_client() -> None:
    for text in (
        '{"command":"echo","args":["hi"],"sudo":false,"wait":true,"logs":true}',
        '{"command":"echo","args":["hi"],"env":{},"sudo":false,"wait":true,"logs":true}',
    ):
        body = decode(bodies.RunBody, text.encode())
        assert (body.command, body.args, body.wait, body.logs) == ("echo", ["hi"], True, True)
        assert (body.cwd, body.timeout, body.attach_stdin) == (UNSET, UNSET, False)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "command"),
        ({"command": ""}, "command"),
        ({"command": "a\0"}, "command"),
        ({"command": "a", "args": ["", "\0"]}, "args[1]"),
        ({"command": "a", "args": ["x" * 131_072]}, "args[0]"),
        ({"command": "a", "args": ["x" * 131_071] * 48}, "args"),
        ({"command": "a", "cwd": ""}, "cwd"),
        ({"command": "a", "timeout": 0}, "timeout"),
        ({"command": "a", "env": {"": "x"}}, 'env[""]'),
    ],
)
def test_a_run_the_kernel_would_refuse_is_refused_first(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(bodies.RunBody, json.dumps(body).encode())
    assert caught.value.field == field


def test_arguments_up_to_the_kernels_limits_are_accepted_and_longer_ones_have_its_error_number() -> None:
    body = {"command": "a", "args": ["x" * 131_071] * 16}
    assert len(decode(bodies.RunBody, json.dumps(body).encode()).args) == 16, "2 MiB"
    for args, field in ((["x" * 131_072], "args[0]"), ([""] * 700_000, "args")):
        with pytest.raises(InvalidRequest) as caught:
            decode(bodies.RunBody, json.dumps({"command": "a", "args": args}).encode())
        assert (caught.value.field, caught.value.errno) == (field, errno.E2BIG)


def test_stdin_is_base64_with_an_offset() -> None:
    assert decode(bodies.StdinBody, b"{}") == bodies.StdinBody()
    body = decode(bodies.StdinBody, b'{"data":"cGluZwo=","offset":0}')
    assert (body.data, body.offset, body.close) == (b"ping\n", 0, False)
    assert decode(bodies.StdinBody, b'{"offset":5,"close":true}').close
    with pytest.raises(InvalidRequest, match="data"):
        decode(bodies.StdinBody, b'{"data":"%%%"}')


@pytest.mark.parametrize(
    ("kind", "text", "field"),
    [
        (bodies.KillBody, '{"signal":0}', "signal"),
        (bodies.KillBody, '{"signal":65}', "signal"),
        (bodies.KillBody, '{"signal":"SIGTERM"}', "signal"),
        (ReadBody, '{"path":""}', "path"),
        (ReadBody, '{"path":"a\\u0000"}', "path"),
        (bodies.MkdirBody, '{"path":"' + "x" * 4096 + '"}', "path"),
        (bodies.ExtendBody, '{"duration":999}', "duration"),
        (bodies.SnapshotBody, '{"expiration":-1}', "expiration"),
        (bodies.DriveBody, '{"projectId":"P","maxSizeBytes":0}', "maxSizeBytes"),
        (bodies.DriveForkBody, '{"name":"a b"}', "name"),
    ],
)
def test_small_bodies_are_bounded(kind: type[Any], text: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(kind, text.encode())
    assert caught.value.field == field


def test_mkdir_makes_parents_unless_told_not_to() -> None:
    assert decode(bodies.MkdirBody, b'{"path":"d1"}').recursive
    assert not decode(bodies.MkdirBody, b'{"path":"d/e","recursive":false}').recursive


def parameters(query: str) -> dict[str, list[str]]:
    return parse_qs(query, keep_blank_values=True)


def test_queries_are_read_from_text() -> None:
    query = convert(
        queries.ListSandboxesQuery,
        parameters("teamId=T&limit=10&sortOrder=asc&namePrefix=py&tags=t:2:3&tags=u:&__x=1"),
    )
    assert (query.limit, query.sort, query.sort_order) == (10, SandboxSort.NAME, SortOrder.ASC)
    assert query.wanted == {"t": "2:3", "u": ""}
    assert convert(queries.ListSandboxesQuery, parameters("tags=")).wanted == {}
    assert convert(queries.ListSandboxesQuery, {}).sort is SandboxSort.CREATED_AT
    assert convert(queries.GetSandboxQuery, parameters("resume=false&resume=true")).resume
    assert not convert(queries.GetSandboxQuery, parameters("resume=false")).resume
    assert convert(queries.SnapshotTreeQuery, parameters("snapshotId=snap_1")).limit == 10


@pytest.mark.parametrize(
    ("kind", "query", "field"),
    [
        (queries.ListSandboxesQuery, "limit=0", "limit"),
        (queries.ListSandboxesQuery, "limit=101", "limit"),
        (queries.ListSandboxesQuery, "limit=ten", "limit"),
        (queries.ListSandboxesQuery, "sortBy=age", "sortBy"),
        (queries.ListSandboxesQuery, "sortBy=createdAt&namePrefix=a", "namePrefix"),
        (queries.ListSandboxesQuery, "tags=novalue", "tags"),
        (queries.ListSandboxesQuery, "tags=a:1&tags=novalue", "tags"),
        (queries.ListSandboxesQuery, "tags=a:1&tags=a:2", "tags"),
        (queries.ListSandboxesQuery, "&".join(f"tags={n}:" for n in range(65)), "tags"),
        (queries.GetSandboxQuery, "resume=maybe", "resume"),
        (queries.SnapshotTreeQuery, "", "snapshotId"),
        (queries.SnapshotTreeQuery, "snapshotId=s&limit=11", "limit"),
    ],
)
def test_a_bad_query_names_its_parameter(kind: type[Any], query: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert(kind, parameters(query))
    assert caught.value.field == field


KEYS = sorted(
    {name for kind in vars(bodies).values() for name in getattr(kind, "__struct_encode_fields__", ())}
    | {
        name
        for kind in (*vars(policies).values(), *vars(policy_json).values())
        for name in getattr(kind, "__struct_encode_fields__", ())
    }
    | {"type", "a.com", "/data", "A"}
)
WORDS = [
    "",
    "a.com",
    "/data",
    "git",
    "snapshot",
    "custom",
    "https://h/r",
    "10.0.0.0/8",
    "\0",
    "é\n",
    "*",
    "[::1",
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 9000)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=6)
    ),
    max_leaves=12,
)


def meant(kind: type[Any], data: bytes) -> None:
    body = decode(kind, data)
    if isinstance(body, bodies.CreateBody):
        body.spec()
        body.spec(legacy=True)
    elif isinstance(body, bodies.ForkBody | bodies.UpdateBody):
        dataclasses.replace(SandboxSpec(), **body.changes())
    elif isinstance(body, policies.PolicyBody):
        policy_json.shown(body.policy())


@pytest.mark.parametrize(
    "kind",
    [
        bodies.CreateBody,
        bodies.ForkBody,
        bodies.UpdateBody,
        bodies.RunBody,
        bodies.StdinBody,
        bodies.DriveBody,
        policies.PolicyBody,
        terminal.Start,
    ],
)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_whatever_arrives_is_understood_or_is_the_callers_mistake(
    kind: type[msgspec.Struct], data: st.DataObject
) -> None:
    names = kind.__struct_encode_fields__
    fields = {name: data.draw(VALUES, name) for name in names if data.draw(st.booleans(), f"{name}?")}
    try:
        meant(kind, json.dumps({"projectId": "P", "command": "c", **fields}).encode())
    except InvalidRequest as error:
        assert error.message


def test_terminal_messages() -> None:
    start = terminal.read_message(
        '{"type":"start","command":"sh","args":[],"env":["TERM=x","PS1=a=\\u0001","=x","y"],"cwd":null}'
    )
    assert isinstance(start, terminal.Start)
    assert (start.cols, start.rows, start.cwd) == (80, 24, None)
    assert start.environment() == {"TERM": "x", "PS1": "a=\x01"}
    resize = terminal.read_message('{"type":"resize","cols":100,"rows":30}')
    assert resize == terminal.Resize(cols=100, rows=30)
    assert json.loads(terminal.exit_message(7)) == {"type": "exit", "code": 7}
    for text in ('{"type":"resize","cols":0,"rows":1}', '{"type":"other"}', "x", '{"type":"start"}'):
        with pytest.raises(InvalidRequest):
            terminal.read_message(text)
