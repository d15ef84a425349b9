"""Errors on the wire: one envelope, a closed table of codes, and the code of every error of the program.

::

    {"error": {"code": "sandbox_stopped", "message": "…", "kind": "session_stopped", "details": {…}}}

Clients act on ``code``; :data:`STATUS` fixes its status. ``kind`` is the program's own, finer name of the
error, from which :func:`exception` rebuilds it in the client. No error that can follow a side effect has a
status of 500 or more, since clients repeat requests that fail that way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from sandkeep import errors
from sandkeep.errors import SandkeepError
from sandkeep.wire.base import Object, encode, parse

STATUS: dict[str, int] = {
    "bad_request": 400,
    "executable_not_found": 400,
    "executable_refused": 400,
    "file_error": 400,
    "command_stdin_unavailable": 400,
    "sandbox_timeout_invalid": 400,
    "snapshot_region_mismatch": 400,
    "limit_reached": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "path_not_found": 404,
    "method_not_allowed": 405,
    "conflict": 409,
    "drive_attached": 409,
    "drive_not_initialized": 409,
    "sandbox_stopped": 410,
    "snapshot_not_found": 410,
    "sandbox_stream_closed": 410,
    "payload_too_large": 413,
    "sandbox_stopping": 422,
    "sandbox_snapshotting": 422,
    "host_cannot": 422,
    "rate_limited": 429,
    "internal_error": 500,
    "bad_gateway": 502,
    "stdin_stalled": 504,
}

_CODES: dict[type[SandkeepError], str] = {
    SandkeepError: "internal_error",
    errors.InvalidRequest: "bad_request",
    errors.TimeoutInvalid: "sandbox_timeout_invalid",
    errors.AccessDenied: "forbidden",
    errors.Unauthenticated: "unauthorized",
    errors.NotFound: "not_found",
    errors.SnapshotGone: "snapshot_not_found",
    errors.Conflict: "conflict",
    errors.NameTaken: "bad_request",
    errors.DriveAttached: "drive_attached",
    errors.DriveNotInitialized: "drive_not_initialized",
    errors.WrongState: "conflict",
    errors.SessionStopped: "sandbox_stopped",
    errors.SessionStopping: "sandbox_stopping",
    errors.SessionSnapshotting: "sandbox_snapshotting",
    errors.LimitReached: "limit_reached",
    errors.BodyTooLarge: "payload_too_large",
    errors.RateLimited: "rate_limited",
    errors.HostCannot: "host_cannot",
    errors.PathError: "file_error",
    errors.PathNotFound: "not_found",
    errors.ProcessError: "bad_request",
    errors.ExecutableNotFound: "executable_not_found",
    errors.ExecutableRefused: "executable_refused",
    errors.StdinUnavailable: "command_stdin_unavailable",
    errors.StdinStalled: "stdin_stalled",
    errors.ImageError: "bad_request",
    errors.LayerError: "internal_error",
    errors.StoreError: "internal_error",
    errors.TransportError: "bad_gateway",
    errors.StreamClosed: "sandbox_stream_closed",
    errors.InternalError: "internal_error",
}
"""Codes by class; a class that is not listed has the code of its nearest ancestor."""

_KINDS = {
    "unauthorized": errors.Unauthenticated,
    "forbidden": errors.AccessDenied,
    "not_found": errors.NotFound,
    "conflict": errors.Conflict,
    "sandbox_stopped": errors.SessionStopped,
    "sandbox_stopping": errors.SessionStopping,
    "sandbox_snapshotting": errors.SessionSnapshotting,
    "snapshot_not_found": errors.SnapshotGone,
    "rate_limited": errors.RateLimited,
    "bad_request": errors.InvalidRequest,
    "internal_error": errors.InternalError,
}
"""For a response without a ``kind``: from another server, or from a proxy."""

_RENAMED = {
    "domains": "allow",
    "allow_subnets": "subnets.allow",
    "deny_subnets": "subnets.deny",
    "retention": "keepLastSnapshots",
    "methods": "method",
    "query": "queryString",
}


class ErrorObject(Object, kw_only=True, frozen=True):
    code: str
    message: str
    kind: str | UnsetType = UNSET
    hint: str | UnsetType = UNSET
    details: dict[str, Any] | UnsetType = UNSET
    bytes_written: int | UnsetType = UNSET
    """How much of the input to a stalled process has arrived."""


class ErrorBody(Object, kw_only=True, frozen=True):
    error: ErrorObject


class ErrorResponse(NamedTuple):
    """The response to a failed request."""

    status: int
    body: bytes
    headers: dict[str, str]


def classify(error: BaseException) -> tuple[int, str]:
    """Return the status and code of an error."""
    code = "internal_error"
    for kind in type(error).__mro__:
        if kind in _CODES:
            code = _CODES[kind]
            break
    if isinstance(error, errors.PathNotFound) and error.details.get("operation") == "mkdir":
        # A missing parent; clients take "not_found" for a missing file.
        code = "path_not_found"
    return STATUS[code], code


def error_response(error: BaseException) -> ErrorResponse:
    """Return the response to a request that failed; it shows nothing of an unexpected error."""
    status, code = classify(error)
    headers: dict[str, str] = {}
    if not isinstance(error, SandkeepError):
        shown = ErrorObject(code=code, message="The server failed unexpectedly; its log has the cause.")
        return ErrorResponse(status, encode(ErrorBody(error=shown)), headers)
    details = dict(error.details)
    message = error.message
    named = errors.InvalidRequest, errors.ConfigurationDiffers
    if isinstance(error, named) and details.get("field"):
        details["field"] = spelled(details["field"])
        message = f"{details['field']}: {details.get('problem', message)}"
    if isinstance(error, errors.RateLimited) and "retry_after" in details:
        headers["retry-after"] = str(details["retry_after"])
    shown = ErrorObject(
        code=code,
        message=message,
        kind=error.code,
        hint=error.hint or UNSET,
        details=details or UNSET,
        bytes_written=details.get("bytes_written", UNSET),
    )
    return ErrorResponse(status, encode(ErrorBody(error=shown), other=str), headers)


def plain(code: str, message: str) -> ErrorResponse:
    """Return a response for a failure without an error class, such as a route that does not exist."""
    shown = ErrorObject(code=code, message=message)
    return ErrorResponse(STATUS[code], encode(ErrorBody(error=shown)), {})


def exception(status: int, body: bytes) -> SandkeepError:
    """Return the error of a server's response."""
    try:
        shown = parse(ErrorBody, body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        from http import HTTPStatus

        phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "unknown status"
        return errors.TransportError(f"the server responded with {status} ({phrase})", status=status)
    details = {} if isinstance(shown.details, UnsetType) else shown.details
    hint = None if isinstance(shown.hint, UnsetType) else shown.hint
    if not isinstance(shown.kind, UnsetType):
        return errors.from_json(
            {"code": shown.kind, "message": shown.message, "hint": hint, "details": details}
        )
    kind = _KINDS.get(shown.code, errors.TransportError if status >= 500 else SandkeepError)
    return kind(shown.message, hint=hint, **{**details, "status": status, "wire_code": shown.code})


def spelled(field_path: str) -> str:
    """Spell a field's path as clients do: ``network_policy.domains["x"]`` is ``networkPolicy.allow["x"]``."""
    out: list[str] = []
    # Quoted parts are the client's own text already.
    for index, part in enumerate(field_path.split('"')):
        out.append(part if index % 2 else ".".join(_spelled_name(name) for name in part.split(".")))
    return '"'.join(out).replace("forwardURL.url", "forwardURL")


def _spelled_name(name: str) -> str:
    word, bracket, rest = name.partition("[")
    if word in _RENAMED:
        word = _RENAMED[word]
    else:
        head, *tail = word.split("_")
        word = head + "".join(part[:1].upper() + part[1:] for part in tail)
    return word + bracket + rest
