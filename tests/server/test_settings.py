"""Settings are looked at by value when a server starts; what only shows later is said to be the server's."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sandkeep.engine.settings import Settings
from sandkeep.errors import InvalidRequest
from sandkeep.server.configuration import read_settings
from tests.polling import until
from tests.server.conftest import create, scoped
from tests.server.server_process import PROJECT, running_server

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pool": -1}, "pool"),
    ({"accept": ["nonsense"]}, "accept"),
    ({"default_image": ""}, "default_image"),
    ({"images": {"node24": " "}}, "images"),
    ({"log_cap_bytes": 0}, "log_cap_bytes"),
    ({"max_timeout_ms": 0}, "max_timeout_ms"),
    ({"snapshot_lifetime_ms": -1}, "snapshot_lifetime_ms"),
    ({"session_history_ms": -1}, "session_history_ms"),
    ({"set_aside_ms": -1}, "set_aside_ms"),
    ({"max_sandboxes": 0}, "max_sandboxes"),
    ({"max_active_sessions": -5}, "max_active_sessions"),
    ({"pids": 0}, "pids"),
    ({"disk_bytes": -1}, "disk_bytes"),
    ({"stop_grace_ms": -1}, "stop_grace_ms"),
    ({"fold_depth": 0}, "fold_depth"),
    ({"max_image_bytes": 0}, "max_image_bytes"),
    ({"max_image_entries": -1}, "max_image_entries"),
    ({"max_images": -1}, "max_images"),
    ({"max_images_bytes": -1}, "max_images_bytes"),
    ({"max_source_bytes": 0}, "max_source_bytes"),
    ({"max_pull_ms": 0}, "max_pull_ms"),
    ({"min_free_percent": 101}, "min_free_percent"),
    ({"insecure_registries": ["http://registry.test"]}, "insecure_registries"),
    ({"insecure_registries": ["registry.test:0"]}, "insecure_registries"),
    ({"proxy": "proxy.test:3128"}, "proxy"),
    ({"proxy": "http://proxy.test:x"}, "proxy"),
    ({"network": {"ingress_port": 99999}}, "network.ingress_port"),
    ({"network": {"ingress_address": "nowhere"}}, "network.ingress_address"),
    ({"network": {"ingress_domain": "https://x"}}, "network.ingress_domain"),
    ({"network": {"allowed": ["10.0.0.0/33"]}}, "network.allowed"),
    ({"network": {"name_servers": ["nonsense"]}}, "network.name_servers"),
    ({"network": {"name_servers": ["127.0.0.1#x"]}}, "network.name_servers"),
    ({"network": {"names": {"a b": ["127.0.0.1"]}}}, "network.names"),
    ({"network": {"names": {"host.test": ["there"]}}}, "network.names"),
    ({"network": {"own_ports": [0]}}, "network.own_ports"),
    ({"network": {"host_ports": [65536]}}, "network.host_ports"),
    ({"network": {"connections": 0}}, "network.connections"),
    ({"network": {"dns_rate": 0}}, "network.dns_rate"),
    ({"network": {"trusted": ["/no/such/file"]}}, "network.trusted"),
    ({"network": {"issuer": " "}}, "network.issuer"),
]


@pytest.mark.parametrize(("settings", "field"), WRONG, ids=[json.dumps(each) for each, _ in WRONG])
def test_a_value_that_cannot_work_is_refused_by_name(
    settings: dict[str, Any], field: str, tmp_path: Path
) -> None:
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidRequest, match=field) as refused:
        read_settings(str(tmp_path))
    assert refused.value.field == field


def test_every_setting_is_looked_at() -> None:
    """Whoever adds a setting says which values can work."""
    refused = {field for _, field in WRONG}
    for settings, prefix in ((Settings(), ""), (Settings().network, "network.")):
        for each in dataclasses.fields(settings):
            if each.name != "network" and not isinstance(getattr(settings, each.name), bool):
                assert prefix + each.name in refused


def test_values_that_work_are_taken(tmp_path: Path) -> None:
    settings = {
        "pool": 0,
        "accept": ["seccomp"],
        "snapshot_lifetime_ms": 0,
        "disk_bytes": None,
        "insecure_registries": [
            "registry.test",
            "registry.test:5000",
            "127.0.0.1:5000",
            "[::1]:5000",
            "[::1]",
        ],
        "proxy": "http://name:password@proxy.test:3128",
        "network": {
            "names": {"host.test": ["127.0.0.1", "::1"]},
            "allowed": ["10.0.0.5/8", "fd00::/8"],
            "name_servers": ["127.0.0.1#5353", "::1"],
            "ingress_domain": "boxes.example.org",
            "ingress_address": "::1",
            "ingress_port": 0,
        },
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    assert read_settings(str(tmp_path)).network.ingress_domain == "boxes.example.org"


def test_a_server_does_not_start_with_a_value_that_cannot_work(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"pool": -1, "network": {"ingress_port": 99999}}')
    command = [sys.executable, "-m", "sandkeep", "serve", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pool is -1" in done.stderr and "network.ingress_port is 99999" in done.stderr, "all at once"


def test_an_image_that_the_settings_name_and_nobody_has_is_no_fault_of_the_caller(able: None) -> None:
    settings = {"default_image": "nope", "images": {"node24": "neither"}}
    with running_server(settings=settings) as server, server.client() as api:
        health = api.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "not ready" and "default_image" in health.json()["problems"][0]
        for body, setting in (({}, "default_image is nope"), ({"runtime": "node24"}, 'images["node24"]')):
            answer = api.post("/v3/sandboxes", params=scoped(), json={"projectId": PROJECT, **body})
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "host_cannot")
            assert setting in answer.json()["error"]["message"]
        mine = api.post("/v3/sandboxes", params=scoped(), json={"projectId": PROJECT, "image": "mine"})
        assert (mine.status_code, mine.json()["error"]["code"]) == (404, "not_found")
        create(api, image="host")


def test_a_network_that_cannot_be_set_up_makes_the_server_not_ready(able: None) -> None:
    """An address that no machine of ours has."""
    settings = {"network": {"ingress_address": "192.0.2.1"}}
    with running_server(settings=settings) as server, server.client() as api:
        until(lambda: api.get("/health").status_code == 503)
        assert "network" in api.get("/health").json()["problems"][0]
        answer = api.post("/v3/sandboxes", params=scoped(), json={"projectId": PROJECT})
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "host_cannot")
        assert "settings.json" in answer.json()["error"]["hint"]


def test_a_session_lives_no_longer_than_allowed_when_nobody_says_how_long(able: None) -> None:
    with running_server(settings={"max_timeout_ms": 60_000}) as server, server.client() as api:
        assert api.get("/health").status_code == 200
        box = create(api)
        assert box.created["session"]["timeout"] == 60_000
