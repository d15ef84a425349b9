"""The internals of uvicorn that ``server/listen.py`` builds on, named one by one.

pyproject.toml keeps uvicorn below the next minor version, because any release may change them. Raise the
bound when this file and tests/server pass with that version.
"""

from __future__ import annotations

import ast
import asyncio
import re
import socket
import tomllib
from importlib.metadata import version
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from sandkeep.server.listen import Listener, Protocol
from tests.conftest import ROOT

METHODS = {
    "_should_upgrade",
    "_unset_keepalive_if_required",
    "connection_lost",
    "connection_made",
    "data_received",
    "handle_websocket_upgrade",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_url",
    "send_400_response",
}
ATTRIBUTES = {
    "app_state": dict,
    "config": uvicorn.Config,
    "cycle": object,
    "flow": object,
    "headers": list,
    "logger": object,
    "loop": asyncio.AbstractEventLoop,
    "parser": object,
    "scope": dict,
    "transport": asyncio.Transport,
    "url": bytes,
}
OF_FLOW = {"drain", "pause_reading", "resume_reading"}
OF_CYCLE = {"expected_content_length", "response_complete"}


def used_names() -> set[str]:
    """What the class takes from itself or from ``super()`` without defining it."""
    tree = ast.parse((ROOT / "src/sandkeep/server/listen.py").read_text())
    [protocol] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Protocol"]
    own = {node.name for node in protocol.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {node.target.id for node in ast.walk(protocol) if _is_own_variable(node)}  # type: ignore[attr-defined]
    of_self: set[str] = set()
    of_super: set[str] = set()
    assigned: set[str] = set()
    for node in ast.walk(protocol):
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            (assigned if isinstance(node.ctx, ast.Store) else of_self).add(node.attr)
        elif isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            of_super.add(node.attr)
    inherited = set(dir(HttpToolsProtocol)) | ATTRIBUTES.keys()
    private = {name for name in assigned if name.startswith("_")}
    return of_super | ((of_self | assigned) - own - private) | (own & inherited)


def _is_own_variable(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def test_the_list_of_internals_is_complete() -> None:
    assert used_names() == METHODS | ATTRIBUTES.keys()


def test_the_internals_are_there() -> None:
    for name in METHODS:
        assert callable(getattr(HttpToolsProtocol, name)), name
    assert callable(uvicorn.Server.capture_signals) and issubclass(Listener, uvicorn.Server)
    asyncio.run(_meets_a_request())


async def _meets_a_request() -> None:
    seen: list[Protocol] = []
    receives: list[Any] = []
    done = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        receives.append(receive)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        done.set()

    config = uvicorn.Config(app, http=Protocol, ws="websockets-sansio", lifespan="off", log_config=None)
    config.load()
    ours, theirs = socket.socketpair()
    state = ServerState()

    def make() -> Protocol:
        seen.append(Protocol(config, state, {}))
        return seen[0]

    with ours:
        await asyncio.get_running_loop().connect_accepted_socket(make, theirs)
        ours.sendall(b"GET /here HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(done.wait(), 10)
        [protocol] = seen
        for name, kind in ATTRIBUTES.items():
            assert isinstance(getattr(protocol, name), kind), name
        assert all(callable(getattr(protocol.flow, name)) for name in OF_FLOW)
        cycle = receives[0].__self__
        assert cycle is protocol.cycle and all(hasattr(cycle, name) for name in OF_CYCLE)
        protocol.transport.abort()
    server = uvicorn.Server(config)
    assert server.started is False and server.should_exit is False


def test_the_installed_version_is_below_the_bound() -> None:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [bound] = [int(found[1]) for line in lines if (found := re.match(r"uvicorn>=0\.\d+,<0\.(\d+);", line))]
    assert int(version("uvicorn").split(".")[1]) < bound
