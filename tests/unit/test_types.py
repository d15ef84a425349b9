"""Public values check themselves, name what is wrong, and do not change."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from sandkeep.checks import duration, milliseconds, within
from sandkeep.errors import InvalidRequest
from sandkeep.policy import (
    Domain,
    Forward,
    Matcher,
    NetworkPolicy,
    PairMatcher,
    RequestMatch,
    Respond,
    Rule,
    Transform,
)
from sandkeep.spec import (
    GitSource,
    Mount,
    Resources,
    SandboxSpec,
    SnapshotRetention,
    SnapshotSource,
    TarballSource,
    in_vendor_words,
    vcpus_of,
    vendor_resources,
)
from sandkeep.states import MountMode, PolicyMode, SessionStatus


def _any(value: Any) -> Any:
    """What somebody without a type checker gives."""
    return value


def test_limits_are_independent_of_each_other() -> None:
    assert Resources() == Resources(2, 4096) == Resources(cpus=2.0)
    assert Resources(0.5) == Resources(cpus=0.5, memory_mb=4096)
    assert Resources(memory_mb=64).cpus == 2
    assert repr(Resources(3.0, 100, 1, 16)) == "Resources(cpus=3, memory_mb=100, disk_mb=1, pids=16)"
    half = Resources(0.5, pids=100, exact=False)
    assert dataclasses.replace(half, memory_mb=128) == Resources(0.5, 128, pids=100)
    assert pickle.loads(pickle.dumps(half)).asked == half.asked == {"cpus": 0.5, "pids": 100}
    assert hash(half) == hash(Resources(0.5, 4096, pids=100))


def test_official_clients_have_memory_by_the_processor() -> None:
    assert vendor_resources(None, None) == Resources()
    assert vendor_resources(4, None) == Resources(4, 8192)
    assert vendor_resources(None, 2048) == Resources(1, 2048)
    assert (vcpus_of(Resources(0.05)), vcpus_of(Resources(2)), vcpus_of(Resources(2.5))) == (1, 2, 3)
    assert in_vendor_words(Resources(4, 8192)) and in_vendor_words(Resources())
    for other in (Resources(4), Resources(0.5, 1024), Resources(3, 6144), Resources(1, 2048, pids=100)):
        assert not in_vendor_words(other)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Resources(0), "cpus"),
        (lambda: Resources(0.04), "cpus"),
        (lambda: Resources(513), "cpus"),
        (lambda: Resources(float("nan")), "cpus"),
        (lambda: Resources(float("inf")), "cpus"),
        (lambda: Resources(2, 63), "memory_mb"),
        (lambda: Resources(memory_mb=(16 << 20) + 1), "memory_mb"),
        (lambda: Resources(disk_mb=0), "disk_mb"),
        (lambda: Resources(pids=15), "pids"),
        (lambda: Resources(pids=_any(100.0)), "pids"),
        (lambda: vendor_resources(3, None), "vcpus"),
        (lambda: vendor_resources(514, None), "vcpus"),
        (lambda: vendor_resources(2, 2048), "memory"),
        (lambda: vendor_resources(None, 3000), "memory"),
        (lambda: SnapshotRetention(0), "count"),
        (lambda: SnapshotRetention(101), "count"),
        (lambda: SnapshotRetention(1, timedelta(seconds=-1)), "expiration"),
        (lambda: GitSource("ext::sh -c id"), "url"),
        (lambda: GitSource("/etc"), "url"),
        (lambda: GitSource("https://h/r", depth=0), "depth"),
        (lambda: GitSource("https://h/r", revision="--upload-pack=x"), "revision"),
        (lambda: TarballSource("file:///etc/passwd"), "url"),
        (lambda: TarballSource("https://[bad"), "url"),
        (lambda: SnapshotSource("../x"), "snapshot_id"),
        (lambda: Mount("a/b"), "drive"),
        (lambda: Matcher(), ""),
        (lambda: Matcher(exact="a", regex="b"), ""),
        (lambda: Matcher(regex="a" * 1025), "regex"),
        (lambda: PairMatcher(), ""),
        (lambda: RequestMatch(methods=("GET", "bad method")), "methods[1]"),
        (lambda: Transform.set_headers({"a b": "c"}), 'headers["a b"]'),
        (lambda: Transform.set_headers({"a": "x\r\nhost: evil"}), 'headers["a"]'),
        (lambda: Transform((("A", "1"), ("a", "2"))), 'headers["a"]'),
        (lambda: Forward("https://h/x?q=1"), "url"),
        (lambda: Respond(199), "status_code"),
        (lambda: Respond(204, body="x", content_type="text/plain"), "body"),
        (lambda: Respond(200, body="x"), "content_type"),
        (lambda: Respond(200, headers=(("Content-Length", "1"),)), 'headers["Content-Length"]'),
        (lambda: Respond(200, headers={"x-a": "b"}), "headers"),  # type: ignore[arg-type]
        (lambda: Respond(200, headers="x-a"), "headers"),  # type: ignore[arg-type]
        (lambda: Respond(200, headers=(("x-a", "b"), "x-c")), "headers[1]"),  # type: ignore[arg-type]
        (lambda: Respond(200, headers=(("x-a", 1),)), "headers[0]"),  # type: ignore[arg-type]
        (lambda: Respond("200"), "status_code"),  # type: ignore[arg-type]
        (lambda: Respond(200, body=b"x", content_type="text/plain"), "body"),  # type: ignore[arg-type]
        (lambda: Transform({"x-a": "b"}), "headers"),  # type: ignore[arg-type]
        (lambda: Transform.set_headers([("x-a", "b")]), "headers"),  # type: ignore[arg-type]
        (lambda: NetworkPolicy.custom(["a..b"]), 'domains["a..b"]'),
        (lambda: NetworkPolicy.custom(["1.2.3.4"]), 'domains["1.2.3.4"]'),
        (lambda: NetworkPolicy.custom(["bücher.de"]), 'domains["bücher.de"]'),
        (lambda: NetworkPolicy.custom(["api-*.x.com"]), 'domains["api-*.x.com"]'),
        (lambda: NetworkPolicy.custom(["a.com", "A.com."]), 'domains["A.com."]'),
        (lambda: NetworkPolicy.custom(allow_subnets=["10.0.0.0/33"]), "allow_subnets[0]"),
        (lambda: NetworkPolicy.custom(deny_subnets=["::/0", "x"]), "deny_subnets[1]"),
        (lambda: NetworkPolicy(PolicyMode.ALLOW_ALL, (Domain("a"),)), "mode"),
        (lambda: SandboxSpec(name="sessions"), "name"),
        (lambda: SandboxSpec(name=""), "name"),
        (lambda: SandboxSpec(name="a/b"), "name"),
        (lambda: SandboxSpec(name="x" * 129), "name"),
        (lambda: SandboxSpec(image="a", runtime="b"), "runtime"),
        (lambda: SandboxSpec(ports=tuple(range(1, 17))), "ports"),
        (lambda: SandboxSpec(ports=(80, 0)), "ports[1]"),
        (lambda: SandboxSpec(ports=(80, 80)), "ports[1]"),
        (lambda: SandboxSpec(timeout=timedelta(0)), "timeout"),
        (lambda: SandboxSpec(env={"A=B": ""}), 'env["A=B"]'),
        (lambda: SandboxSpec(env={"A": "x\0"}), 'env["A"]'),
        (lambda: SandboxSpec(env={"A": "x" * 131_070}), 'env["A"]'),
        (lambda: SandboxSpec(tags={str(n): "" for n in range(65)}), "tags"),
        (lambda: SandboxSpec(tags={"a:b": ""}), 'tags["a:b"]'),
        (lambda: SandboxSpec(mounts={"/a/../b": Mount("d")}), 'mounts["/a/../b"]'),
        (lambda: SandboxSpec(mounts={"a": Mount("d")}), 'mounts["a"]'),
        (lambda: SandboxSpec(mounts={"/": Mount("d")}), 'mounts["/"]'),
        (lambda: SandboxSpec(mounts={"//a": Mount("d")}), 'mounts["//a"]'),
        (lambda: SandboxSpec(mounts={"/run": Mount("d")}), 'mounts["/run"]'),
        (lambda: SandboxSpec(mounts={"/a": Mount("d"), "/a/b": Mount("e")}), 'mounts["/a/b"]'),
        (lambda: SandboxSpec(mounts={f"/m{n}": Mount("d") for n in range(5)}), "mounts"),
        (lambda: SandboxSpec(failover_regions=("iad1",)), "failover_regions[0]"),
        (lambda: Resources(_any("2")), "cpus"),
        (lambda: Resources(_any(True)), "cpus"),
        (lambda: Resources(memory_mb=_any(True)), "memory_mb"),
        (lambda: SnapshotRetention(_any("1")), "count"),
        (lambda: SnapshotRetention(1, float("nan")), "expiration"),
        (lambda: SnapshotRetention(1, -1), "expiration"),
        (lambda: Mount("d", _any("snapshot")), "mode"),
        (lambda: SandboxSpec(name=_any(5)), "name"),
        (lambda: SandboxSpec(timeout=_any(5)), "timeout"),
        (lambda: SandboxSpec(ports=(_any("80"),)), "ports[0]"),
        (lambda: SandboxSpec(env=_any([("A", "B")])), "env"),
        (lambda: SandboxSpec(env={"A": _any(None)}), 'env["A"]'),
        (lambda: SandboxSpec(env={"A": "\ud800"}), 'env["A"]'),
        (lambda: SandboxSpec(tags={"A": _any(1)}), 'tags["A"]'),
        (lambda: SandboxSpec(mounts={"/d": _any("d")}), 'mounts["/d"]'),
        (lambda: SandboxSpec(persistent=_any("no")), "persistent"),
        (lambda: SandboxSpec(retention=_any(3)), "retention"),
        (lambda: SandboxSpec(network_policy=_any("deny-all")), "network_policy"),
        (lambda: SandboxSpec(source=_any("x")), "source"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_field(
    build: Callable[[], Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build()
    assert caught.value.field == field
    assert caught.value.problem
    assert field in caught.value.message


def test_a_spec_has_the_documented_defaults() -> None:
    spec = SandboxSpec()
    assert (spec.persistent, spec.timeout, spec.resources) == (True, timedelta(minutes=5), Resources(2))
    assert spec.network_policy == NetworkPolicy.allow_all()
    assert (spec.region, spec.retention, spec.snapshot_expiration) == ("iad1", None, None)


def test_values_do_not_change_not_even_through_what_they_were_built_from() -> None:
    env = {"A": "1"}
    spec = SandboxSpec(name="a", env=env, mounts={"/data": Mount("d", MountMode.SNAPSHOT)})
    env["A"] = "2"
    assert spec.env["A"] == "1"
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "b"  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec.env["A"] = "3"  # type: ignore[index]
    policy = NetworkPolicy.custom({"a.com": [Rule(Forward("https://p.example/x"))]})
    assert hash(policy) == hash(NetworkPolicy.custom({"a.com": [Rule(Forward("https://p.example/x"))]}))


def test_replace_makes_a_new_spec_and_checks_it_again() -> None:
    spec = SandboxSpec(name="a", region="iad1", failover_regions=("sfo1",))
    assert dataclasses.replace(spec, name="b").failover_regions == ("sfo1",)
    with pytest.raises(InvalidRequest):
        dataclasses.replace(spec, region="sfo1")


def test_secrets_do_not_show_in_a_repr() -> None:
    git = GitSource("https://h/r", username="u", password="hunter2")
    policy = NetworkPolicy.custom({"a.com": [Rule(Transform.set_headers({"authorization": "hunter2"}))]})
    spec = SandboxSpec(source=git, env={"T": "hunter2"}, network_policy=policy)
    assert "hunter2" not in repr(spec)


def test_durations_are_timedeltas_or_seconds() -> None:
    assert duration(1.5) == duration(timedelta(milliseconds=1500))
    assert milliseconds(timedelta(seconds=2, microseconds=1999)) == 2001


def test_a_retention_takes_seconds_too() -> None:
    assert SnapshotRetention(2, 60) == SnapshotRetention(2, timedelta(minutes=1))


def test_within_extends_the_path_of_a_field() -> None:
    with pytest.raises(InvalidRequest) as caught, within('allow["x"]'), within("[0].match.path"):
        Matcher(regex="a" * 2000)
    assert caught.value.field == 'allow["x"][0].match.path.regex'
    assert caught.value.message.startswith('allow["x"][0].match.path.regex: must have')


def test_final_statuses() -> None:
    assert {status.value for status in SessionStatus if status.is_final} == {"stopped", "failed", "aborted"}
