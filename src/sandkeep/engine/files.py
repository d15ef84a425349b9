"""Files of a running session: the engine checks its state, its driver does the operation."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any

from sandkeep.engine.context import Context
from sandkeep.engine.lifecycle import Operation
from sandkeep.engine.sessions import Sessions
from sandkeep.host.control import DIRECT_BYTES
from sandkeep.host.driver import Acting, Download, Upload, WriteOptions
from sandkeep.host.driver import Files as SessionFiles
from sandkeep.host.reports import FileChange, FileLines, FileStat, TreeEntry

__all__ = ["DIRECT_BYTES", "Acting", "FileStat", "Files", "TreeEntry", "WriteOptions"]


class Files:
    """Operations on a session's files. Those that change something are recorded as events."""

    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context = context
        self._sessions = sessions

    async def _of(self, project: str, session: str) -> SessionFiles:
        found = await self._sessions.require(project, session, Operation.FILES)
        return self._context.driver.files(self._context.ref(found))

    def changed(self, project: str, session: str, operation: str, path: str, **data: Any) -> None:
        """Record a change that was made from outside the session."""
        found = self._sessions.get(project, session)
        self._context.event("files.changed", found, operation=operation, path=path, **data)

    # --- looking -----------------------------------------------------------------------------------------

    async def stat(
        self, project: str, session: str, path: str, acting: Acting, *, follow: bool = True
    ) -> FileStat:
        return await (await self._of(project, session)).stat(path, acting, follow=follow)

    async def list(self, project: str, session: str, path: str, acting: Acting) -> Sequence[FileStat]:
        return await (await self._of(project, session)).list(path, acting)

    async def readlink(self, project: str, session: str, path: str, acting: Acting) -> str:
        return await (await self._of(project, session)).readlink(path, acting)

    async def realpath(
        self, project: str, session: str, path: str, acting: Acting, *, strict: bool = False
    ) -> str:
        return await (await self._of(project, session)).realpath(path, acting, strict=strict)

    async def open_read(
        self,
        project: str,
        session: str,
        path: str,
        acting: Acting,
        *,
        offset: int = 0,
        length: int | None = None,
        direct: bool,
    ) -> Download:
        """Open a file to read it; ``direct`` if it may be sent to a socket."""
        files = await self._of(project, session)
        return await files.open_read(path, acting, offset=offset, length=length, direct=direct)

    async def lines(
        self,
        project: str,
        session: str,
        path: str,
        acting: Acting,
        *,
        start: int,
        limit: int,
        max_bytes: int,
    ) -> FileLines:
        files = await self._of(project, session)
        return await files.lines(path, acting, start=start, limit=limit, max_bytes=max_bytes)

    async def archive(
        self, project: str, session: str, paths: Sequence[str], acting: Acting, *, ignore: Sequence[str] = ()
    ) -> AsyncIterator[bytes]:
        """Yield a tar archive of files and trees."""
        files = await self._of(project, session)
        async for piece in files.archive(paths, acting, ignore=ignore):
            yield piece

    async def watch(
        self, project: str, session: str, path: str, acting: Acting, *, recursive: bool = True
    ) -> AsyncIterator[Sequence[FileChange]]:
        """Yield changes below a directory, in batches; an empty first batch says that watching began."""
        files = await self._of(project, session)
        async for changes in files.watch(path, acting, recursive=recursive):
            yield changes

    async def tree(
        self,
        project: str,
        session: str,
        path: str,
        acting: Acting,
        *,
        ignore: Sequence[str] = (),
        checksum: bool = False,
    ) -> AsyncIterator[Sequence[TreeEntry]]:
        """Yield everything below a directory, in batches."""
        files = await self._of(project, session)
        async for entries in files.tree(path, acting, ignore=ignore, checksum=checksum):
            yield entries

    async def tree_archive(
        self, project: str, session: str, path: str, names: Sequence[str], acting: Acting
    ) -> AsyncIterator[bytes]:
        """Yield a tar archive of entries below a directory, with exact times."""
        files = await self._of(project, session)
        async for piece in files.tree_archive(path, names, acting):
            yield piece

    # --- changing ----------------------------------------------------------------------------------------

    async def mkdir(
        self,
        project: str,
        session: str,
        path: str,
        acting: Acting,
        *,
        mode: int = 0o755,
        parents: bool = False,
    ) -> None:
        await (await self._of(project, session)).mkdir(path, acting, mode=mode, parents=parents)
        self.changed(project, session, "mkdir", path)

    async def rename(
        self, project: str, session: str, path: str, target: str, acting: Acting, *, replace: bool = True
    ) -> None:
        await (await self._of(project, session)).rename(path, target, acting, replace=replace)
        self.changed(project, session, "rename", path)

    async def remove(
        self,
        project: str,
        session: str,
        path: str,
        acting: Acting,
        *,
        recursive: bool = False,
        missing_ok: bool = False,
    ) -> None:
        files = await self._of(project, session)
        await files.remove(path, acting, recursive=recursive, missing_ok=missing_ok)
        self.changed(project, session, "remove", path)

    async def symlink(self, project: str, session: str, path: str, target: str, acting: Acting) -> None:
        await (await self._of(project, session)).symlink(path, target, acting)
        self.changed(project, session, "symlink", path)

    async def chmod(self, project: str, session: str, path: str, mode: int, acting: Acting) -> None:
        await (await self._of(project, session)).chmod(path, mode, acting)
        self.changed(project, session, "chmod", path)

    async def copy(
        self, project: str, session: str, path: str, target: str, acting: Acting, *, parents: bool = False
    ) -> int:
        """Copy a file; return its size."""
        copied = await (await self._of(project, session)).copy(path, target, acting, parents=parents)
        self.changed(project, session, "copy", path)
        return copied

    async def write(
        self,
        project: str,
        session: str,
        path: str,
        data: AsyncIterable[bytes],
        acting: Acting,
        options: WriteOptions,
    ) -> int:
        """Replace a file by the content of ``data``, all of it or nothing; return the number of bytes."""
        written = await (await self._of(project, session)).write(path, data, acting, options)
        self.changed(project, session, "write", path, bytes=written)
        return written

    async def open_write(
        self, project: str, session: str, path: str, acting: Acting, options: WriteOptions
    ) -> Upload | None:
        """Write a file like ``write``, from a socket; return ``None`` where that is not possible.

        The caller reports it with ``changed`` once the content has arrived.
        """
        return await (await self._of(project, session)).open_write(path, acting, options)

    async def extract(
        self,
        project: str,
        session: str,
        data: AsyncIterable[bytes],
        *,
        cwd: str,
        acting: Acting | None = None,
    ) -> int:
        """Unpack a tar archive, plain or gzip, below ``cwd``, as the acting user; return the entry count."""
        files = await self._of(project, session)
        entries = await files.extract(cwd, data, acting or Acting())
        self.changed(project, session, "extract", cwd, entries=entries)
        return entries

    async def tree_extract(
        self, project: str, session: str, path: str, data: AsyncIterable[bytes], acting: Acting
    ) -> int:
        """Unpack an archive of ``tree_archive``'s kind below ``path``; return how many entries."""
        files = await self._of(project, session)
        entries = await files.tree_extract(path, data, acting)
        self.changed(project, session, "extract", path, entries=entries)
        return entries

    async def tree_remove(
        self, project: str, session: str, path: str, names: Sequence[str], acting: Acting
    ) -> Sequence[str]:
        """Remove entries below a directory; return the directories that stay because they are not empty."""
        kept = await (await self._of(project, session)).tree_remove(path, names, acting)
        self.changed(project, session, "remove", path, entries=len(names) - len(kept))
        return kept
