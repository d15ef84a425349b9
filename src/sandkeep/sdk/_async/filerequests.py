"""Requests of file operations: the user, the session and the body of each."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, TypeVar

from sandkeep.checks import expect, refuse
from sandkeep.errors import (
    ArchiveError,
    PathError,
    RequestTimeout,
    SandkeepError,
    TransportError,
    path_error_kind,
)
from sandkeep.sdk import retry
from sandkeep.sdk._async.recovery import Recovery
from sandkeep.sdk._async.transport import Body, Transport, decode
from sandkeep.sdk._compat_async import sleep
from sandkeep.wire.base import MAX_SAFE
from sandkeep.wire.v1 import FileObject, FileShown, Written

T = TypeVar("T")

TRANSFER_SECONDS = 300.0
"""How long a file operation may go without receiving anything."""
_REPEATABLE = frozenset({"stat", "list", "lines", "readlink", "realpath", "copy", "chmod", "tree/remove"})
"""Operations that change nothing, or have the same result when carried out twice."""


class FileRequests:
    """The requests behind :class:`Files`; each resumes the sandbox if needed."""

    def __init__(self, transport: Transport, recovery: Recovery, *, user: str | None) -> None:
        self._transport = transport
        self._recovery = recovery
        self._user = user
        self._acting: dict[str, str] = {} if user is None else {"user": user}

    def _at(self, cwd: str | None) -> Self:
        """Return the same files with another directory for relative paths."""
        if cwd is None:
            return self
        expect("cwd", cwd, str, "a path as text")
        if not cwd:
            refuse("cwd", "must not be empty")
        files = type(self)(self._transport, self._recovery, user=self._user)
        files._acting["cwd"] = cwd
        return files

    async def _do(
        self, operation: str, path: str, *, done: type[SandkeepError] | None = None, **arguments: Any
    ) -> bytes:
        """``done``: the refusal that a second identical request gets; see ``Transport.request``."""
        check_path("path", path)
        if "target" in arguments:
            check_path("target", arguments["target"])
        body = {"path": path, **arguments, **self._acting}

        async def send(session: str) -> bytes:
            return await self._transport.request(
                "POST", own(session, operation), json=body, replay=operation in _REPEATABLE, done=done
            )

        return await self._recovery.run(send)

    async def _put(
        self,
        path: str,
        body: Body,
        *,
        mode: int | None = None,
        size: int | None = None,
        append: bool = False,
        exclusive: bool = False,
    ) -> int:
        query = {**self._query(path), "parents": "true"}
        if mode is not None:
            expect("mode", mode, int, "a number such as 0o644")
            query["mode"] = str(mode)
        if append:
            query["append"] = "true"
        if exclusive:
            query["exclusive"] = "true"
        headers = {"Content-Type": "application/octet-stream"}
        if size is not None:
            headers["Content-Length"] = str(size)

        async def send(session: str) -> int:
            response = await self._transport.request(
                "PUT",
                own(session, "content"),
                query=query,
                body=body,
                headers=headers,
                replay=not append and not exclusive,
                timeout=TRANSFER_SECONDS,
            )
            return decode(Written, response).bytes_written

        return await self._recovery.run(send)

    async def _extract(
        self, body: Body, *, absolute: bool, named: Mapping[str, str] | None = None, before: int = 0
    ) -> None:
        """Unpack an archive below ``/``, or below the directory for relative paths.

        Args:
            body: the archive.
            absolute: unpack below ``/``.
            named: returns the caller's name of an entry, if that differs from the entry's own.
            before: number of entries that earlier requests put in place.
        """
        query = {**self._acting, "cwd": "/"} if absolute else dict(self._acting)

        def path(entry: str) -> str:
            given = "/" + entry if absolute else entry
            return given if named is None else named.get(entry, given)

        async def send(session: str) -> None:
            await self._transport.request(
                "PUT",
                own(session, "archive"),
                query=query,
                body=body,
                headers={"Content-Type": "application/x-tar"},
                replay=True,
                timeout=TRANSFER_SECONDS,
            )

        try:
            await self._recovery.run(send)
        except ArchiveError as error:
            raise of_entry(error, "write", path, before=before) from error

    async def _fetched(self, fetch: Callable[[str], Awaitable[T]]) -> T:
        """Run a download; start it again from the beginning if the connection is lost."""
        again = retry.Reconnecting()
        while True:
            try:
                return await self._recovery.run(fetch)
            except RequestTimeout:
                raise
            except TransportError as error:
                await sleep(again.after(error))

    async def _reading(self, path: str) -> tuple[str, FileObject]:
        """Check that the session runs and the file can be read; return both."""
        check_path("path", path)

        async def check(session: str) -> tuple[str, FileObject]:
            body = {"path": path, **self._acting}
            response = await self._transport.request("POST", own(session, "stat"), json=body, replay=True)
            return session, decode(FileShown, response).file

        return await self._recovery.run(check)

    def _query(self, path: str) -> dict[str, str]:
        check_path("path", path)
        return {"path": path, **self._acting}


def check_path(name: str, path: object) -> None:
    """Check that a path inside a sandbox is text."""
    expect(name, path, str, "a path as text")


def check_data(data: object) -> None:
    """Check the bytes for a file; ``bytes()`` would turn a number into that many zeros."""
    expect("data", data, (bytes, bytearray, memoryview), "bytes")


def check_count(name: str, value: int, *, least: int = 0, most: int = MAX_SAFE) -> int:
    """Return a whole number that must be in these bounds."""
    expect(name, value, int, "a number")
    if value < least:
        refuse(name, f"must be at least {least}, not {value}")
    if value > most:
        refuse(name, f"must be at most {most}, not {value}")
    return value


def of_entry(
    error: ArchiveError, operation: str, path: Callable[[str], str], *, before: int = 0
) -> PathError:
    """Return the failure of an archive as that of a single path, if one path failed.

    Args:
        error: the server's error.
        operation: the operation on that path.
        path: returns the caller's name of an entry.
        before: number of entries that earlier requests put in place.
    """
    details = {**error.details, "operation": operation}
    if isinstance(entry := details.get("entry"), str):
        details["path"] = path(entry.rstrip("/"))
    if "entries" in details:
        details["entries"] += before
    failed = len(details.get("unreadable", ())) + len(details.get("changed", ()))
    number = details.get("errno")
    kind: type[PathError] = type(error)
    message = error.message
    if number is not None and "path" in details and failed <= 1:
        kind = path_error_kind(number)
        message = f"{operation} {details['path']}: {os.strerror(number)}"
    typed = kind(message, hint=error.hint, **details)
    typed.http_status = error.http_status
    return typed


def own(session: str, operation: str) -> str:
    """Return the route of a file operation."""
    return f"/v1/sessions/{session}/fs/{operation}"
