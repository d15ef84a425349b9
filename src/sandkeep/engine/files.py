"""Files of a running session: checked for its state here, done by its supervisor."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any, Final

from sandkeep.engine.context import Context
from sandkeep.engine.lifecycle import Operation
from sandkeep.engine.sessions import Sessions
from sandkeep.host.control import DIRECT_BYTES
from sandkeep.host.driver import Download, SessionRef, Upload

__all__ = ["DIRECT_BYTES", "Files"]

_LOOKING: Final = {"stat", "list", "readlink"}


class Files:
    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context = context
        self._sessions = sessions

    async def _ref(self, project: str, session: str) -> SessionRef:
        return self._context.ref(await self._sessions.require(project, session, Operation.FILES))

    async def do(self, project: str, session: str, operation: str, **arguments: Any) -> dict[str, Any]:
        """A small operation: stat, list, mkdir, rename, remove, symlink, readlink, chmod, chown, copy."""
        ref = await self._ref(project, session)
        answer = await self._context.driver.files(ref, operation, **arguments)
        if operation not in _LOOKING:
            self.changed(project, session, operation, arguments["path"])
        return answer

    def changed(self, project: str, session: str, operation: str, path: str, **data: Any) -> None:
        """Record a change that somebody made from outside."""
        found = self._sessions.get(project, session)
        self._context.event("files.changed", found, operation=operation, path=path, **data)

    async def open_read(
        self, project: str, session: str, path: str, *, direct: bool, **arguments: Any
    ) -> Download:
        """A file, open; ``direct`` if it may be sent to a socket. Others: cwd, offset, length, user, root."""
        ref = await self._ref(project, session)
        return await self._context.driver.open_read(ref, path, direct=direct, **arguments)

    async def open_write(self, project: str, session: str, path: str, **arguments: Any) -> Upload | None:
        """As ``write``, for content that is on a socket; ``None`` where that is not possible.

        Whoever brings the content says so with ``changed`` when it is there.
        """
        ref = await self._ref(project, session)
        return await self._context.driver.open_write(ref, path, **arguments)

    async def write(
        self, project: str, session: str, path: str, data: AsyncIterable[bytes], **arguments: Any
    ) -> int:
        """Replace a file with what ``data`` yields, all of it or nothing. Returns the number of bytes."""
        ref = await self._ref(project, session)
        answer = await self._context.driver.files(ref, "write", data=data, path=path, **arguments)
        written = int(answer["bytes_written"])
        self.changed(project, session, "write", path, bytes=written)
        return written

    async def extract(
        self, project: str, session: str, data: AsyncIterable[bytes], *, cwd: str, **options: Any
    ) -> dict[str, Any]:
        """Unpack a tar archive, plain or gzip, below ``cwd``; files belong to the acting user."""
        ref = await self._ref(project, session)
        answer = await self._context.driver.files(ref, "extract", data=data, path=cwd, **options)
        self.changed(project, session, "extract", cwd, entries=answer["entries"])
        return answer

    async def watch(
        self, project: str, session: str, path: str, **options: Any
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Changes below a directory, in batches; the first, empty one says that watching has begun."""
        ref = await self._ref(project, session)
        async for changes in self._context.driver.watch(ref, path, **options):
            yield changes

    async def archive(
        self, project: str, session: str, paths: Sequence[str], *, cwd: str | None = None, **options: Any
    ) -> AsyncIterator[bytes]:
        """A tar stream of files and trees."""
        ref = await self._ref(project, session)
        reading = self._context.driver.archive(ref, list(paths), cwd=cwd, **options)
        async for piece in reading:
            yield piece
