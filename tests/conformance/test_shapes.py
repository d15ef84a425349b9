"""Real clients accept the shapes the wire package makes, and their requests are understood."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandkeep.errors import RateLimited, TransportError
from sandkeep.spec import Resources
from sandkeep.wire import errors
from tests.conformance.clients import Client
from tests.conformance.expectations import SHAPES, SHARED
from tests.conformance.stub import Stub, stub

SEEN = {
    name: SHARED[name]
    for name in (
        "create_default",
        "create_image",
        "create_configured",
        "duplicate_name",
        "invalid_create",
        "get_missing",
        "update",
        "extend_by_update",
        "missing_executable",
        "network_policy",
    )
} | SHAPES


@pytest.fixture
def shapes() -> Iterator[Stub]:
    with stub() as found:
        yield found


@pytest.mark.parametrize("surface", ["async", "sync"])
@pytest.mark.parametrize("name", SEEN)
def test_python(python_client: Client, shapes: Stub, surface: str, name: str) -> None:
    assert python_client.run(surface, name, server=shapes).observed == SEEN[name]
    assert not shapes.boxes, "the driver leaves nothing behind"
    assert all(query["teamId"] == shapes.team for _, _, query in shapes.requests)


@pytest.mark.parametrize("name", SEEN)
def test_node(node_client: Client, shapes: Stub, name: str) -> None:
    assert node_client.run(name, server=shapes).observed == SEEN[name]
    assert not shapes.boxes, "the driver leaves nothing behind"


def test_limits_that_official_clients_cannot_name_are_whole_numbers_to_them(
    python_client: Client, node_client: Client, shapes: Stub
) -> None:
    shapes.resources = Resources(0.5, 256, 1024, 100)
    wanted = {**SHARED["create_default"], "vcpus": 1, "memory": 256}
    assert python_client.run("sync", "create_default", server=shapes).observed == wanted
    assert node_client.run("create_default", server=shapes).observed == wanted


def test_a_request_refused_for_now_is_sent_again_and_done_once(node_client: Client, shapes: Stub) -> None:
    shapes.faults += [
        errors.error_response(RateLimited("slow down", retry_after=1)),
        errors.error_response(TransportError("the host does not answer")),
    ]
    assert node_client.run("create_default", server=shapes).observed == SHARED["create_default"]
    creations = [
        path for method, path, _ in shapes.requests if method == "POST" and path.endswith("/sandboxes")
    ]
    assert len(creations) == 3


def test_the_command_line_repeats_too(cli_client: Client, shapes: Stub) -> None:
    shapes.faults += [errors.error_response(RateLimited("slow down", retry_after=1))]
    created = cli_client.run("create", "--name", "cli", server=shapes)
    assert created.status == 0, created.stderr
    assert [path for method, path, _ in shapes.requests if method == "POST"] == ["/api/v3/sandboxes"] * 2


@pytest.mark.parametrize("surface", ["async", "sync"])
def test_python_waits_for_a_pending_session(python_client: Client, shapes: Stub, surface: str) -> None:
    shapes.pending = 2
    observed = python_client.run(surface, "create_default", server=shapes).observed
    assert observed == SHARED["create_default"]
    assert [method for method, _, _ in shapes.requests[:3]] == ["POST", "GET", "GET"]


def test_cli(cli_client: Client, shapes: Stub) -> None:
    created = cli_client.run("create", "--name", "cli", "--timeout", "10m", server=shapes)
    assert created.status == 0, created.stderr
    assert shapes.boxes["cli"].spec.interactive
    ran = cli_client.run("exec", "cli", "--", "echo", "héllo", server=shapes)
    assert (ran.status, ran.stdout, ran.stderr) == (3, "héllo\n", "$ echo héllo\nhéllo\n")
    assert cli_client.run("exec", "cli", "--", "vanish", server=shapes).status not in (0, 3)
    removed = cli_client.run("rm", "cli", server=shapes)
    assert removed.status == 0, removed.stderr
    assert not shapes.boxes
