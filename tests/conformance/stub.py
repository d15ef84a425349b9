"""Answers built from the wire's own structs, for asking real clients whether they accept the shapes.

Nothing runs behind it: it remembers what was created and echoes it. It shows that requests are understood and
answers are parsed, before and apart from everything a server does.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import UNSET

from sandkeep.checks import milliseconds
from sandkeep.errors import ExecutableNotFound, InvalidRequest, NameTaken, NotFound, SandkeepError
from sandkeep.net import policy as policies
from sandkeep.policy import NetworkPolicy
from sandkeep.policy_json import shown
from sandkeep.spec import Resources, SandboxSpec, vcpus_of
from sandkeep.states import OutputStream, SessionStatus
from sandkeep.wire import bodies, errors, responses, streams
from sandkeep.wire.base import decode, encode
from sandkeep.wire.objects import (
    CommandObject,
    RouteObject,
    SandboxObject,
    SessionObject,
    limits_object,
    spec_fields,
)
from sandkeep.wire.policies import PolicyBody

NOW = 1_700_000_000_000
TEAM, PROJECT = "team_stub", "prj_stub"


def _part(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


TOKEN = ".".join(
    [
        _part({"alg": "none", "typ": "JWT"}),
        _part({"owner_id": TEAM, "project_id": PROJECT, "exp": 4_102_444_800, "iat": 1}),
        "c2lnbmF0dXJl",
    ]
)


@dataclass
class Box:
    spec: SandboxSpec
    live: NetworkPolicy
    timeout: int

    @property
    def session_id(self) -> str:
        return f"sbx_{self.spec.name}"

    def sandbox(self, status: SessionStatus = SessionStatus.RUNNING) -> SandboxObject:
        assert self.spec.name is not None
        return SandboxObject(
            name=self.spec.name,
            current_session_id=self.session_id,
            status=status,
            created_at=NOW,
            updated_at=NOW,
            project_id=PROJECT,
            cwd="/vercel/sandbox",
            image="host@sha256:" + "0" * 64,
            **spec_fields(self.spec),
        )

    def session(self, status: SessionStatus = SessionStatus.RUNNING) -> SessionObject:
        return SessionObject(
            id=self.session_id,
            status=status,
            memory=self.spec.resources.memory_mb,
            vcpus=vcpus_of(self.spec.resources),
            timeout=self.timeout,
            region=self.spec.region,
            cwd="/vercel/sandbox",
            runtime=self.spec.runtime or "host",
            requested_at=NOW,
            started_at=NOW,
            created_at=NOW,
            updated_at=NOW,
            source_sandbox_name=self.spec.name or "",
            project_id=PROJECT,
            network_policy=shown(self.live),
            interactive_port=1,
            resources=limits_object(self.spec.resources) or UNSET,
        )

    def routes(self) -> list[RouteObject]:
        return [
            RouteObject(url=f"http://{self.spec.name}-{port}.localhost", subdomain=f"s{port}", port=port)
            for port in self.spec.ports
        ]

    def started(self, status: SessionStatus = SessionStatus.RUNNING) -> responses.SandboxStarted:
        return responses.SandboxStarted(
            sandbox=self.sandbox(status), session=self.session(status), routes=self.routes(), resumed=False
        )


@dataclass
class Stub:
    """A :class:`~tests.conformance.clients.Server` that remembers requests."""

    url: str
    token: str = TOKEN
    team: str = TEAM
    project: str = PROJECT
    boxes: dict[str, Box] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    faults: list[errors.ErrorResponse] = field(default_factory=list)
    """Sent instead of the next answers, without doing anything."""
    pending: int = 0
    """In how many answers sessions are still starting."""
    resources: Resources | None = None
    """What sandboxes have instead of what the client asked for: limits that only our own clients can name."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        parts = [unquote(part) for part in path.removeprefix("/api").strip("/").split("/")]
        match method, *parts:
            case "POST", ("v2" | "v3") as version, "sandboxes":
                spec = decode(bodies.CreateBody, body).spec(legacy=version == "v2")
                spec = dataclasses.replace(spec, resources=self.resources or spec.resources)
                return self._json(self._started(self._create(spec)))
            case "GET", "v2", "sandboxes", name:
                return self._json(self._started(self._box(name)))
            case "PATCH", "v2", "sandboxes", name:
                box = self._box(name)
                box.spec = dataclasses.replace(box.spec, **decode(bodies.UpdateBody, body).changes())
                return self._json(responses.SandboxUpdated(sandbox=box.sandbox(), routes=box.routes()))
            case "DELETE", "v2", "sandboxes", name:
                box = self._box(name)
                del self.boxes[name]
                return self._json(responses.SandboxDeleted(sandbox=box.sandbox()))
            case "POST", "v2", "sandboxes", "sessions", session, action:
                return self._session(self._box(session.removeprefix("sbx_")), action, body)
        raise NotFound(f"{method} {path}")

    def _started(self, box: Box) -> responses.SandboxStarted:
        if not self.pending:
            return box.started()
        self.pending -= 1
        return box.started(SessionStatus.PENDING)

    def _session(self, box: Box, action: str, body: bytes) -> tuple[int, str, bytes]:
        if action == "stop":
            return self._json(responses.SessionStopped(session=box.session(), sandbox=box.sandbox()))
        if action == "network-policy":
            box.live = decode(PolicyBody, body).policy()
        elif action == "extend-timeout":
            box.timeout += decode(bodies.ExtendBody, body).duration
        elif action == "cmd":
            return self._run(box, decode(bodies.RunBody, body))
        else:
            raise NotFound(action)
        return self._json(responses.SessionChanged(session=box.session()))

    def _run(self, box: Box, body: bodies.RunBody) -> tuple[int, str, bytes]:
        """Knows a program that prints its arguments to both streams, and one whose session stops."""
        if body.command not in ("echo", "vanish"):
            raise ExecutableNotFound(f"{body.command}: not found", command=body.command)
        command = CommandObject(
            id="cmd_1",
            name=body.command,
            args=body.args,
            cwd="/vercel/sandbox",
            session_id=box.session_id,
            started_at=NOW,
            exit_code=None,
        )
        text = " ".join(body.args) + "\n"
        lines = [streams.command_record(command), streams.HEARTBEAT]
        lines += [streams.output_record(stream, text) for stream in OutputStream]
        if body.command == "vanish":
            lines += [streams.error_record("sandbox_stopped", "the session has stopped")]
            return 200, streams.CONTENT_TYPE, b"".join(lines)
        ended = CommandObject(**{**_fields(command), "exit_code": 3, "duration_ms": 1})
        return 200, streams.CONTENT_TYPE, b"".join([*lines, streams.command_record(ended)])

    def _create(self, spec: SandboxSpec) -> Box:
        policies.validate(spec.network_policy)
        if spec.name is None:
            raise InvalidRequest("name: the stub makes up none", field="name")
        if spec.name in self.boxes:
            raise NameTaken(f"{spec.name} exists", name=spec.name)
        box = self.boxes[spec.name] = Box(spec, spec.network_policy, milliseconds(spec.timeout))
        return box

    def _box(self, name: str) -> Box:
        try:
            return self.boxes[name]
        except KeyError:
            raise NotFound(f"no sandbox {name}", kind="sandbox", name=name) from None

    def _json(self, value: Any) -> tuple[int, str, bytes]:
        return 200, "application/json", encode(value)


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


@contextmanager
def stub() -> Iterator[Stub]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        found = Stub(f"http://127.0.0.1:{server.server_address[1]}")
        server.stub = found  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        stub: Stub = self.server.stub  # type: ignore[attr-defined]
        parts = urlsplit(self.path)
        stub.requests.append((self.command, parts.path, dict(parse_qsl(parts.query))))
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        kind = "application/json"
        headers: dict[str, str] = {}
        try:
            if stub.faults:
                status, data, headers = stub.faults.pop(0)
            else:
                status, kind, data = stub.answer(self.command, parts.path, body)
        except SandkeepError as error:
            status, data, headers = errors.error_response(error)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PATCH = do_DELETE = _handle

    def log_message(self, format: str, *args: Any) -> None:
        pass
