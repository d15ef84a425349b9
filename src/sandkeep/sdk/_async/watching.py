"""Changes below a directory of a sandbox, reported by its session as they happen."""

from __future__ import annotations

import posixpath
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from sandkeep.errors import StreamClosed, TransportError
from sandkeep.sdk import retry
from sandkeep.sdk._async.transport import QUIET_SECONDS, Transport, records
from sandkeep.sdk._compat_async import sleep
from sandkeep.sdk.values import FileChange
from sandkeep.wire.v1 import ChangeObject, ChangesRecord


async def watched(
    transport: Transport, session: str, body: dict[str, Any]
) -> AsyncGenerator[list[FileChange], None]:
    """Yield batches of changes, the first one empty; reconnects if the connection is lost, with ``overflow``.

    ``body`` is that of the request; paths are returned below its ``path`` as it was spelled there.
    """
    lost: list[FileChange] = []
    again = retry.Reconnecting()
    while True:
        try:
            async with aclosing(_records(transport, session, body)) as found:
                root = ""
                async for record in found:
                    again.heard()
                    if isinstance(record.path, str):
                        root = record.path
                        yield lost
                    else:
                        yield [_change(change, root, body["path"]) for change in record.changes]
            raise StreamClosed("the server ended the stream of changes", session=session)
        except TransportError as error:
            await sleep(again.after(error))
            # Changes during the outage are unknown.
            lost = [FileChange(body["path"], "overflow", is_dir=True)]


async def _records(
    transport: Transport, session: str, body: dict[str, Any]
) -> AsyncGenerator[ChangesRecord, None]:
    path = f"/v1/sessions/{session}/fs/watch"
    async with (
        transport.stream("POST", path, json=body, timeout=QUIET_SECONDS) as response,
        aclosing(records(ChangesRecord, response)) as lines,
    ):
        async for record in lines:
            yield record


def _change(change: ChangeObject, root: str, path: str) -> FileChange:
    below = change.path.removeprefix(root).lstrip("/")
    where = posixpath.join(path, below) if below else path
    return FileChange(where, "changed" if change.kind == "modified" else change.kind, change.directory)
