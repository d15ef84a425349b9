"""How file operations are asked for: as whom, in which session, with what on the way."""

from __future__ import annotations

from typing import Any

from sandkeep.sdk._async.recovery import Recovery
from sandkeep.sdk._async.transport import Body, Transport, read
from sandkeep.types import expect
from sandkeep.wire.additions import Written

TRANSFER_SECONDS = 300.0
"""How long a file operation may go without a sign of life."""


class FileRequests:
    """The requests behind :class:`Files`; each resumes the sandbox when it has to."""

    def __init__(self, transport: Transport, recovery: Recovery, *, user: str | None) -> None:
        self._transport = transport
        self._recovery = recovery
        self._acting = {} if user is None else {"user": user}

    async def _do(self, operation: str, path: str, **arguments: Any) -> bytes:
        check_path("path", path)
        if "target" in arguments:
            check_path("target", arguments["target"])
        body = {"path": path, **arguments, **self._acting}

        async def send(session: str) -> bytes:
            return await self._transport.request("POST", own(session, operation), json=body)

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
            answer = await self._transport.request(
                "PUT",
                own(session, "content"),
                query=query,
                body=body,
                headers=headers,
                timeout=TRANSFER_SECONDS,
            )
            return read(Written, answer).bytes_written

        return await self._recovery.run(send)

    async def _extract(self, body: Body, *, cwd: str | None) -> None:
        query = dict(self._acting) if cwd is None else {**self._acting, "cwd": cwd}

        async def send(session: str) -> None:
            await self._transport.request(
                "PUT",
                own(session, "archive"),
                query=query,
                body=body,
                headers={"Content-Type": "application/x-tar"},
                timeout=TRANSFER_SECONDS,
            )

        await self._recovery.run(send)

    async def _reading(self, path: str) -> str:
        """The session to read from, once it is known that it runs and the file can be read."""
        check_path("path", path)

        async def check(session: str) -> str:
            body = {"path": path, **self._acting}
            await self._transport.request("POST", own(session, "stat"), json=body)
            return session

        return await self._recovery.run(check)

    def _query(self, path: str) -> dict[str, str]:
        check_path("path", path)
        return {"path": path, **self._acting}


def check_path(name: str, path: object) -> None:
    """A path inside a sandbox is text; anything else would be sent as something else."""
    expect(name, path, str, "a path as text")


def check_data(data: object) -> None:
    """What goes into a file as bytes; ``bytes()`` takes numbers too and makes zeros of them."""
    expect("data", data, (bytes, bytearray, memoryview), "bytes")


def own(session: str, operation: str) -> str:
    """The route of a file operation."""
    return f"/v1/sessions/{session}/fs/{operation}"
