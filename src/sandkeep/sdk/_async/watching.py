"""What changes below a directory of a sandbox, told by its session as it happens."""

from __future__ import annotations

import posixpath
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from sandkeep.errors import StreamClosed, TransportError
from sandkeep.sdk import retry
from sandkeep.sdk._async.transport import QUIET_SECONDS, Transport, records
from sandkeep.sdk.concurrent import sleep
from sandkeep.sdk.values import FileChange
from sandkeep.wire.additions import ChangeObject, ChangesRecord


async def watched(
    transport: Transport, session: str, body: dict[str, Any]
) -> AsyncGenerator[list[FileChange], None]:
    """Changes in batches, the first one empty; a connection lost on the way is made again, and told of.

    ``body`` is the request's; paths come back below its ``path`` as that was spelled.
    """
    lost: list[FileChange] = []
    attempt = 0
    while True:
        try:
            async with aclosing(_records(transport, session, body)) as found:
                root = ""
                async for record in found:
                    attempt = 0
                    if isinstance(record.path, str):
                        root = record.path
                        yield lost
                    else:
                        yield [_change(change, root, body["path"]) for change in record.changes]
            raise StreamClosed("the stream of changes ended", session=session)
        except TransportError:
            attempt += 1
            if attempt > 2 * retry.ATTEMPTS:
                raise
            await sleep(retry.backoff(attempt))
            # Nobody knows what happened meanwhile.
            lost = [FileChange(body["path"], "overflow", is_dir=True)]


async def _records(
    transport: Transport, session: str, body: dict[str, Any]
) -> AsyncGenerator[ChangesRecord, None]:
    path = f"/v1/sessions/{session}/fs/watch"
    async with (
        transport.stream("POST", path, json=body, timeout=QUIET_SECONDS) as answer,
        aclosing(records(ChangesRecord, answer)) as lines,
    ):
        async for record in lines:
            yield record


def _change(change: ChangeObject, root: str, path: str) -> FileChange:
    below = change.path.removeprefix(root).lstrip("/")
    where = posixpath.join(path, below) if below else path
    return FileChange(where, "changed" if change.kind == "modified" else change.kind, change.directory)
