"""The OpenAPI 3.1 document, made from the structs that do the decoding and encoding.

The server describes its routes with :class:`DocumentedRoute`; :func:`document` adds
everything those structs know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sandkeep.wire import streams
from sandkeep.wire.base import Body
from sandkeep.wire.errors import STATUS, ErrorBody

JSON = "application/json"
OCTETS = "application/octet-stream"
GZIP = "application/gzip"
NDJSON = streams.CONTENT_TYPE

_REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedRoute:
    """One method of one path, as the document describes it."""

    method: str
    path: str
    """With ``{name}`` for each variable part."""
    summary: str
    operation: str
    """Unique; code generators name functions after it."""
    tag: str
    request: Any = None
    """A struct for JSON, or the content type of a body that is bytes."""
    request_required: bool = True
    response: Any = None
    """A struct for JSON, ``None`` for an empty response."""
    response_types: Sequence[str] = ()
    """Content types of responses that are not (only) JSON."""
    status: int = 200
    also: Sequence[int] = ()
    """Other statuses with the same response."""
    query: type[Body] | None = None
    errors: Sequence[str] = ()
    """Codes of :data:`sandkeep.wire.errors.STATUS`."""
    public: bool = False
    """Needs no token."""


def document(
    routes: Iterable[DocumentedRoute], *, title: str, version: str, description: str = ""
) -> dict[str, Any]:
    """Return the whole document, ready to be encoded."""
    routes = list(routes)
    schemas, components = _schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": description},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }


def _schemas(routes: list[DocumentedRoute]) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    kinds: list[Any] = [ErrorBody]
    for route in routes:
        for kind in (route.request, route.response, route.query):
            if kind is not None and not isinstance(kind, str) and kind not in kinds:
                kinds.append(kind)
    found, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    return dict(zip(kinds, found, strict=True)), components


def _operation(route: DocumentedRoute, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.summary,
        "tags": [route.tag],
        "responses": _responses(route, schemas),
    }
    parameters = [*_path_parameters(route.path), *_query_parameters(route.query)]
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        operation["requestBody"] = {
            "required": route.request_required,
            "content": _request_content(route.request, schemas),
        }
    if route.public:
        operation["security"] = []
    return operation


def _request_content(request: Any, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    if isinstance(request, str):
        return {request: {}}
    return {JSON: {"schema": schemas[request]}}


def _responses(route: DocumentedRoute, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.response is not None:
        content[JSON] = {"schema": schemas[route.response]}
    for kind in route.response_types:
        content[kind] = {}
    success: dict[str, Any] = {"description": route.summary}
    if content:
        success["content"] = content
    responses: dict[str, Any] = {str(status): success for status in (route.status, *route.also)}
    by_status: dict[int, list[str]] = {}
    for code in route.errors:
        by_status.setdefault(STATUS[code], []).append(code)
    for status, codes in sorted(by_status.items()):
        responses[str(status)] = {
            "description": ", ".join(codes),
            "content": {JSON: {"schema": schemas[ErrorBody]}},
        }
    return responses


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = [part.partition("}")[0] for part in path.split("{")[1:]]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(kind: type[Body] | None) -> list[dict[str, Any]]:
    if kind is None:
        return []
    parameters = []
    _, components = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    shape = components[kind.__name__]
    for name, schema in shape["properties"].items():
        parameters.append(
            {"name": name, "in": "query", "required": name in shape.get("required", ()), "schema": schema}
        )
    return parameters
