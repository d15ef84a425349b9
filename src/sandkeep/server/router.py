"""The table of routes, from which requests are matched and the OpenAPI document is made.

A path is matched by its segments. A fixed word has priority over ``{…}`` at the same position, so
``/v2/sandboxes/drives`` is never a sandbox named drives.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sandkeep.server.http import Reply, StreamingReply
from sandkeep.wire.openapi import DocumentedRoute

if TYPE_CHECKING:
    from sandkeep.server.app import RequestContext

Handler = Callable[["RequestContext"], Awaitable[Reply | StreamingReply]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route and its handler."""

    route: DocumentedRoute
    handler: Handler
    uses_session: bool = True
    """Whether a request whose path names a session counts as activity of the session."""

    @property
    def changes(self) -> bool:
        """Whether a failed request may have changed something."""
        return self.route.method not in ("GET", "HEAD")


class Table:
    """Collects endpoints; each module of routes has one and decorates its handlers with it."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.endpoints: list[Endpoint] = []

    def route(
        self, method: str, *paths: str, uses_session: bool = True, **described: Any
    ) -> Callable[[Handler], Handler]:
        """Answer ``method`` on each path with the decorated handler, named after it in the document."""

        if "request" in described:
            described["errors"] = tuple(dict.fromkeys((*described["errors"], "payload_too_large")))

        def register(handler: Handler) -> Handler:
            for index, path in enumerate(paths):
                name = handler.__name__ if index == 0 else f"{handler.__name__}_{index + 1}"
                route = DocumentedRoute(method=method, path=path, operation=name, tag=self.tag, **described)
                self.endpoints.append(Endpoint(route, handler, uses_session))
            return handler

        return register


class _Node:
    __slots__ = ("methods", "name", "variable", "words")

    def __init__(self) -> None:
        self.words: dict[str, _Node] = {}
        self.variable: _Node | None = None
        self.name = ""
        self.methods: dict[str, Endpoint] = {}


class Router:
    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._root = _Node()
        for endpoint in endpoints:
            self._add(endpoint)

    def _add(self, endpoint: Endpoint) -> None:
        node = self._root
        for segment in endpoint.route.path.strip("/").split("/"):
            if segment.startswith("{"):
                if node.variable is None:
                    node.variable = _Node()
                    node.variable.name = segment.strip("{}")
                node = node.variable
            else:
                node = node.words.setdefault(segment, _Node())
        if endpoint.route.method in node.methods:
            raise ValueError(f"{endpoint.route.method} {endpoint.route.path} is registered twice")
        node.methods[endpoint.route.method] = endpoint

    def find(self, path: str) -> tuple[dict[str, Endpoint], dict[str, str]] | None:
        """Return the endpoints at a (still percent-encoded) path by method, and its variables."""
        node = self._root
        values: dict[str, str] = {}
        for segment in path.removeprefix("/").removesuffix("/").split("/"):
            following = node.words.get(segment)
            if following is None:
                following = node.variable
                if following is None or not segment:
                    return None
                values[following.name] = unquote(segment) if "%" in segment else segment
            node = following
        return (node.methods, values) if node.methods else None
