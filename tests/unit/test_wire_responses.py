"""Responses leave out what is unknown, errors have one shape, and streams survive any chunking."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkeep import errors
from sandkeep.policy import NetworkPolicy
from sandkeep.spec import Mount, Resources, SandboxSpec, SnapshotRetention
from sandkeep.states import OutputStream, SessionStatus, SnapshotStatus
from sandkeep.wire import bodies, objects, openapi, queries, responses, streams
from sandkeep.wire.base import encode, known
from sandkeep.wire.errors import _CODES, STATUS, classify, error_response, exception, plain
from sandkeep.wire.objects import CommandObject, SandboxObject, SessionObject, SnapshotObject, spec_fields

SANDBOX: dict[str, Any] = {"name": "a", "current_session_id": "sbx_1", "created_at": 1, "updated_at": 2}
SESSION = SessionObject(
    id="sbx_1",
    status=SessionStatus.RUNNING,
    memory=4096,
    vcpus=2,
    timeout=300000,
    region="iad1",
    cwd="/vercel/sandbox",
    runtime="node24",
    requested_at=1,
    created_at=1,
    updated_at=1,
)
COMMAND = CommandObject(
    id="cmd_1", name="sh", args=["-c", "é"], cwd="/", session_id="sbx_1", started_at=1, exit_code=None
)
SNAPSHOT = SnapshotObject(
    id="snap_1",
    source_session_id="sbx_1",
    region="iad1",
    status=SnapshotStatus.CREATED,
    size_bytes=1,
    created_at=1,
    updated_at=1,
)


def test_a_sandbox_shows_its_configuration_but_not_its_environment() -> None:
    spec = SandboxSpec(
        env={"SECRET": "hunter2"},
        resources=Resources(4, 8192),
        timeout=timedelta(minutes=1),
        tags={"t": "1"},
        mounts={"/d": Mount("d")},
        snapshot_expiration=timedelta(0),
        retention=SnapshotRetention(3),
        network_policy=NetworkPolicy.deny_all(),
    )
    shown = json.loads(encode(SandboxObject(status=SessionStatus.RUNNING, **SANDBOX, **spec_fields(spec))))
    assert shown == {
        "name": "a",
        "currentSessionId": "sbx_1",
        "status": "running",
        "persistent": True,
        "createdAt": 1,
        "updatedAt": 2,
        "region": "iad1",
        "vcpus": 4,
        "memory": 8192,
        "exactResources": True,
        "timeout": 60000,
        "networkPolicy": {"mode": "deny-all"},
        "snapshotExpiration": 0,
        "keepLastSnapshots": {"count": 3, "deleteEvicted": True},
        "tags": {"t": "1"},
        "mounts": {"/d": {"drive": "d", "mode": "read-write"}},
    }


def test_official_clients_read_whole_processors_and_what_was_asked_for_is_beside_them() -> None:
    assert spec_fields(SandboxSpec()).keys().isdisjoint({"resources", "exact_resources"})
    found = spec_fields(SandboxSpec(resources=Resources(0.5, 256, pids=100, exact=False)))
    assert (found["vcpus"], found["memory"]) == (1, 256)
    assert json.loads(encode(found["resources"])) == {"cpus": 0.5, "memoryMb": 256, "pids": 100}


def test_cleared_mounts_and_tags_are_shown_as_empty() -> None:
    shown = json.loads(
        encode(SandboxObject(status=SessionStatus.RUNNING, **SANDBOX, **spec_fields(SandboxSpec())))
    )
    assert (shown["mounts"], shown["tags"]) == ({}, {})


def test_only_the_fields_clients_expect_to_be_null_can_be() -> None:
    """Every optional field is left out instead, because clients reject null there."""
    nullable = set()
    for module in (objects, responses):
        for name, kind in vars(module).items():
            if (
                isinstance(kind, type)
                and issubclass(kind, msgspec.Struct)
                and kind.__module__ == module.__name__
            ):
                for field, hint in get_type_hints(kind).items():
                    if type(None) in get_args(hint):
                        nullable.add(f"{name}.{field}")
    assert nullable == {
        "Pagination.next",
        "CommandObject.exit_code",
        "UserObject.default_team_id",
        "TeamsPagination.next",
    }


def test_null_is_there_where_clients_need_it() -> None:
    assert json.loads(encode(COMMAND))["exitCode"] is None
    assert encode(objects.Pagination(count=0, next=None)) == b'{"count":0,"next":null}'


def test_a_session_always_has_a_runtime_and_integers_stay_integers() -> None:
    shown = json.loads(encode(SESSION))
    assert shown["runtime"] == "node24"
    assert not any(isinstance(value, float) for value in shown.values())
    assert "startedAt" not in shown


def test_tree_nodes_count_in_text() -> None:
    node = objects.tree_node(SNAPSHOT, [SNAPSHOT, SNAPSHOT])
    assert (node.count, objects.tree_node(SNAPSHOT, [], more=True).count) == ("3", "1+")


def test_known_drops_what_is_none() -> None:
    assert known(a=1, b=None, c=0) == {"a": 1, "c": 0}


def test_stop_leaves_the_snapshot_out_when_there_is_none() -> None:
    sandbox = SandboxObject(status=SessionStatus.STOPPED, persistent=False, **SANDBOX)
    stopped = json.loads(encode(responses.SessionStopped(session=SESSION, sandbox=sandbox)))
    assert set(stopped) == {"session", "sandbox"}


def every_error(root: type[errors.SandkeepError] = errors.SandkeepError) -> list[type[errors.SandkeepError]]:
    found = [root]
    for child in root.__subclasses__():
        found.extend(every_error(child))
    return found


def test_every_family_of_errors_has_a_code_and_every_code_a_status() -> None:
    for family in errors.SandkeepError.__subclasses__():
        assert family in _CODES, f"{family.__name__} would be an internal error"
    assert set(_CODES.values()) <= set(STATUS)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidRequest("x"), 400, "bad_request"),
        (errors.NameTaken("x"), 400, "bad_request"),
        (errors.ExecutableNotFound("x"), 400, "executable_not_found"),
        (errors.StdinUnavailable("x"), 400, "command_stdin_unavailable"),
        (errors.TimeoutInvalid("x"), 400, "sandbox_timeout_invalid"),
        (errors.Unauthenticated("x"), 401, "unauthorized"),
        (errors.AccessDenied("x"), 403, "forbidden"),
        (errors.NotFound("x"), 404, "not_found"),
        (errors.Conflict("x"), 409, "conflict"),
        (errors.DriveAttached("x"), 409, "drive_attached"),
        (errors.DriveNotInitialized("x"), 409, "drive_not_initialized"),
        (errors.SessionStopped("x"), 410, "sandbox_stopped"),
        (errors.SnapshotGone("x"), 410, "snapshot_not_found"),
        (errors.StreamClosed("x"), 410, "sandbox_stream_closed"),
        (errors.BodyTooLarge("x"), 413, "payload_too_large"),
        (errors.SessionStopping("x"), 422, "sandbox_stopping"),
        (errors.SessionSnapshotting("x"), 422, "sandbox_snapshotting"),
        (errors.RateLimited("x"), 429, "rate_limited"),
        (errors.StdinStalled("x"), 504, "stdin_stalled"),
        (ZeroDivisionError(), 500, "internal_error"),
        (errors.path_error(OSError(2, ""), "read", "/x"), 404, "not_found"),
        (errors.path_error(OSError(2, ""), "mkdir", "/x"), 404, "path_not_found"),
        (errors.path_error(OSError(21, ""), "read", "/x"), 400, "file_error"),
        (errors.path_error(OSError(13, ""), "read", "/x"), 400, "file_error"),
        (errors.path_error(OSError(28, ""), "write", "/x"), 400, "file_error"),
        (errors.path_error(OSError(17, ""), "mkdir", "/x"), 400, "file_error"),
    ],
)
def test_errors_have_the_status_and_code_clients_act_on(error: Exception, status: int, code: str) -> None:
    assert classify(error) == (status, code)
    found = error_response(error)
    body = json.loads(found.body)
    assert (found.status, body["error"]["code"]) == (status, code)
    assert set(body) == {"error"}
    assert isinstance(body["error"]["message"], str)


def test_a_missing_parent_is_told_in_the_kernels_words() -> None:
    body = json.loads(error_response(errors.path_error(OSError(2, ""), "mkdir", "/a/b")).body)
    assert "No such file or directory" in body["error"]["message"]


def test_a_subclass_made_elsewhere_is_its_parent_on_the_wire() -> None:
    class Special(errors.SessionStopped):
        pass

    assert classify(Special("x")) == (410, "sandbox_stopped")
    # The tree is walked by other tests; leave it as it was found.
    del Special


def test_extra_facts_of_errors() -> None:
    assert error_response(errors.RateLimited("x", retry_after=3)).headers == {"retry-after": "3"}
    assert (
        json.loads(error_response(errors.StdinStalled("x", bytes_written=7)).body)["error"]["bytesWritten"]
        == 7
    )


def test_an_unexpected_error_shows_nothing_of_itself() -> None:
    assert b"hunter2" not in error_response(RuntimeError("hunter2")).body


def test_a_validation_message_starts_with_the_field_in_the_clients_spelling() -> None:
    error = errors.InvalidRequest("x", field='network_policy.domains["a_b.c"][0].match', problem="is odd")
    body = json.loads(error_response(error).body)["error"]
    assert body["message"] == 'networkPolicy.allow["a_b.c"][0].match: is odd'


@pytest.mark.parametrize("kind", [kind for kind in every_error() if kind is not errors.SandkeepError])
def test_an_error_comes_out_on_the_other_side_as_it_went_in(kind: type[errors.SandkeepError]) -> None:
    sent = error_response(kind("what", hint="do this", name="n"))
    back = exception(sent.status, sent.body)
    assert (type(back), back.message, back.hint, back.name) == (kind, "what", "do this", "n")


def test_answers_from_elsewhere_become_errors_too() -> None:
    stopped = exception(410, plain("sandbox_stopped", "gone").body)
    assert isinstance(stopped, errors.SessionStopped)
    assert isinstance(exception(502, b"<html>"), errors.TransportError)
    assert isinstance(exception(599, b""), errors.TransportError)


def test_stream_records_are_single_ascii_lines() -> None:
    for line in (
        streams.command_record(COMMAND),
        streams.output_record(OutputStream.STDOUT, 'é\0\u2028😀"\\\n'),
        streams.error_record("sandbox_stopped", "günther"),
    ):
        assert line.isascii()
        assert line.count(b"\n") == 1
        assert line.endswith(b"}\n")
    assert json.loads(streams.command_record(COMMAND))["command"]["args"] == ["-c", "é"]
    record = json.loads(streams.output_record(OutputStream.STDERR, "a\0é😀"))
    assert record == {"stream": "stderr", "data": "a\0é😀"}
    assert json.loads(streams.error_record("c", "m")) == {
        "stream": "error",
        "data": {"code": "c", "message": "m"},
    }


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([b"a", "é".encode(), "😀".encode(), b"\xff", b"\xf0\x9f", b"\xc3", b"\xed\xa0\x80"])
    ),
    st.lists(st.integers(1, 5)),
)
def test_text_does_not_depend_on_how_the_bytes_were_cut(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"".join(pieces)
    text = streams.OutputText()
    got, position = "", 0
    for cut in cuts:
        got += text.feed(OutputStream.STDOUT, data[position : position + cut])
        position += cut
    got += text.feed(OutputStream.STDOUT, data[position:])
    got += "".join(rest for _, rest in text.finish())
    assert got == data.decode("utf-8", "replace")


def test_the_two_streams_do_not_mix() -> None:
    text = streams.OutputText()
    assert text.feed(OutputStream.STDOUT, b"\xc3") == ""
    assert text.feed(OutputStream.STDERR, b"\xa9") == "\ufffd"
    assert text.feed(OutputStream.STDOUT, b"\xa9") == "é"
    assert list(text.finish()) == []


def test_the_openapi_document_describes_bodies_answers_and_errors() -> None:
    document = openapi.document(
        [
            openapi.DocumentedRoute(
                method="POST",
                path="/v3/sandboxes",
                summary="Create a sandbox",
                operation="createSandbox",
                tag="sandboxes",
                request=bodies.CreateBody,
                response=responses.SandboxStarted,
                errors=["bad_request", "forbidden", "snapshot_not_found"],
            ),
            openapi.DocumentedRoute(
                method="GET",
                path="/v2/sandboxes/sessions/{sid}/cmd/{cid}/logs",
                summary="Follow the output",
                operation="logs",
                tag="commands",
                response_types=[openapi.NDJSON],
                query=queries.GetCommandQuery,
            ),
            openapi.DocumentedRoute(
                method="GET", path="/health", summary="Alive", operation="health", tag="server", public=True
            ),
        ],
        title="t",
        version="1",
    )
    assert msgspec.json.decode(msgspec.json.encode(document)) == document
    create = document["paths"]["/v3/sandboxes"]["post"]
    assert create["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/CreateBody"
    }
    assert set(create["responses"]) == {"200", "400", "403", "410"}
    logs = document["paths"]["/v2/sandboxes/sessions/{sid}/cmd/{cid}/logs"]["get"]
    assert [parameter["name"] for parameter in logs["parameters"]] == ["sid", "cid", "wait"]
    assert list(logs["responses"]["200"]["content"]) == ["application/x-ndjson"]
    assert document["paths"]["/health"]["get"]["security"] == []
    schemas = document["components"]["schemas"]
    assert "__interactive" in schemas["CreateBody"]["properties"]
    assert schemas["SandboxObject"]["required"][:2] == ["name", "currentSessionId"]
    assert {reference.rpartition("/")[2] for reference in find_references(document)} <= set(schemas)


def find_references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [found for item in value.values() for found in find_references(item)]
    if isinstance(value, list):
        return [found for item in value for found in find_references(item)]
    return []
