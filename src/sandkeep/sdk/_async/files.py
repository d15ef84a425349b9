"""The files of a sandbox: names from ``os`` and ``pathlib``, paths inside the sandbox as text."""

from __future__ import annotations

import codecs
import errno
import fnmatch
import os
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, overload

from sandkeep.checks import expect, refuse
from sandkeep.errors import (
    NotDirectory,
    PathError,
    PathExists,
    PathNotFound,
    PathPermission,
)
from sandkeep.sdk._async.batch import Batch
from sandkeep.sdk._async.filerequests import (
    TRANSFER_SECONDS,
    check_count,
    check_data,
    check_path,
    of_entry,
    own,
)
from sandkeep.sdk._async.openfile import BinaryReader, BinaryWriter, TextFileReader, TextFileWriter
from sandkeep.sdk._async.syncing import SyncedFiles
from sandkeep.sdk._async.transport import decode, each
from sandkeep.sdk._async.watching import watched
from sandkeep.sdk._compat_async import Pending
from sandkeep.sdk.values import FileChange, FileLines, FileStat, Transferred
from sandkeep.wire.v1 import FileList, FileObject, FileShown, LinesShown, LinkShown, PathShown, Written

if TYPE_CHECKING:
    from sandkeep.sdk.local import Progress, TreeReader, TreeWriter

ReadMode = Literal["rb"]
WriteMode = Literal["wb", "ab", "xb"]
TextReadMode = Literal["r"]
TextWriteMode = Literal["w", "a", "x"]


class Files(SyncedFiles):
    """The filesystem of a sandbox.

    Relative paths start in ``cwd``, an argument of every operation, which itself may be relative to the
    sandbox's working directory; by default it is that directory. Everything acts as the sandbox's user unless
    the handle came from :meth:`Sandbox.as_user`. Operations on a stopped sandbox resume it first.

    Failures are subclasses of :class:`~sandkeep.errors.PathError` that name the path.
    """

    # --- whole files -------------------------------------------------------------------------------------

    async def read_bytes(
        self, path: str, *, offset: int = 0, length: int | None = None, cwd: str | None = None
    ) -> bytes:
        """Return the content of a file, or a range of it.

        Args:
            path: the file.
            offset: the first byte to return; beyond the end of the file nothing is returned.
            length: how many bytes to return at most; by default all that follow.
            cwd: directory that a relative path starts in.

        Raises:
            PathNotFound: the file does not exist.
            IsDirectory: it is a directory.
            InvalidRequest: ``offset`` or ``length`` is negative.
        """
        query = self._at(cwd)._query(path)
        if offset != 0:
            query["offset"] = str(check_count("offset", offset))
        if length is not None:
            query["length"] = str(check_count("length", length))

        async def fetch(session: str) -> bytes:
            return await self._transport.request(
                "GET", own(session, "content"), query=query, timeout=TRANSFER_SECONDS
            )

        return await self._recovery.run(fetch)

    async def read_text(
        self, path: str, *, encoding: str = "utf-8", errors: str = "strict", cwd: str | None = None
    ) -> str:
        """Return the content of a text file.

        Raises:
            UnicodeDecodeError: the file has another encoding; pass ``errors="replace"`` to read it anyway.
        """
        return (await self.read_bytes(path, cwd=cwd)).decode(encoding, errors)

    async def read_lines(
        self,
        path: str,
        *,
        start: int = 1,
        limit: int = 2000,
        max_bytes: int = 1 << 20,
        encoding: str = "utf-8",
        errors: str = "strict",
        cwd: str | None = None,
    ) -> FileLines:
        """Return a range of lines of a text file; only these are sent.

        Args:
            path: the file. Its lines end with a line feed, which is one byte in its encoding.
            start: the first line; lines are counted from 1.
            limit: how many lines to return at most.
            max_bytes: only as many whole lines as fit into this, at most 4 MiB; a single longer line is cut.
            encoding: of the file.
            errors: what to do with bytes that are not text, as for ``bytes.decode``.
            cwd: directory that a relative path starts in.

        Returns:
            The lines, and whether the file goes on after them; none if the file has fewer.

        Raises:
            InvalidRequest: ``start`` or ``limit`` is not at least 1.
            UnicodeDecodeError: the file has another encoding; pass ``errors="replace"`` to read it anyway.
        """
        asked: dict[str, Any] = {
            "start": check_count("start", start, least=1),
            "limit": check_count("limit", limit, least=1),
            "maxBytes": check_count("max_bytes", max_bytes, least=1, most=4 << 20),
        }
        shown = decode(LinesShown, await self._at(cwd)._do("lines", path, **asked))
        # The end of a line that was cut may be a part of a character.
        decoder = codecs.getincrementaldecoder(encoding)(errors)
        text = decoder.decode(shown.text.encode(errors="surrogateescape"), not shown.cut)
        return FileLines(text, shown.start, shown.lines, shown.more, shown.cut)

    async def write_bytes(
        self, path: str, data: bytes, *, mode: int | None = None, cwd: str | None = None
    ) -> int:
        """Replace a file atomically. Missing parent directories are created.

        Args:
            path: the file.
            data: its new content.
            mode: its permission bits; by default those of the existing file, or 0644.
            cwd: directory that a relative path starts in.

        Returns:
            The number of bytes written.

        Raises:
            NoSpace: the sandbox's disk is full.
        """
        check_data(data)
        return await self._at(cwd)._put(path, bytes(data), mode=mode)

    async def write_text(
        self,
        path: str,
        text: str,
        *,
        mode: int | None = None,
        encoding: str = "utf-8",
        cwd: str | None = None,
    ) -> int:
        """Replace a text file atomically; as :meth:`write_bytes`."""
        expect("text", text, str, "text")
        return await self.write_bytes(path, text.encode(encoding), mode=mode, cwd=cwd)

    @overload
    def open(
        self, path: str, mode: TextReadMode = "r", *, encoding: str = ..., cwd: str | None = ...
    ) -> Pending[TextFileReader]: ...

    @overload
    def open(
        self, path: str, mode: TextWriteMode, *, encoding: str = ..., cwd: str | None = ...
    ) -> Pending[TextFileWriter]: ...

    @overload
    def open(self, path: str, mode: ReadMode, *, cwd: str | None = ...) -> Pending[BinaryReader]: ...

    @overload
    def open(self, path: str, mode: WriteMode, *, cwd: str | None = ...) -> Pending[BinaryWriter]: ...

    def open(
        self, path: str, mode: str = "r", *, encoding: str = "utf-8", cwd: str | None = None
    ) -> Pending[Any]:
        """Open a file to stream its content in chunks.

        A file opened for writing appears, or changes, when it is closed without an error. Until then the
        content is in a draft beside it, which is removed if writing is abandoned (as leaving ``async with``
        by an exception does). Appended data is written immediately.

        Args:
            path: the file.
            mode: ``r``, ``w``, ``x`` (must not exist) or ``a``, with ``b`` for bytes.
            encoding: of text.
            cwd: directory that a relative path starts in.

        Returns:
            A reader or writer: close it yourself, or use ``async with``.
        """
        check_path("path", path)
        expect("mode", mode, str, "text")
        if mode.removesuffix("b") not in ("r", "w", "x", "a"):
            refuse("mode", f"{mode!r} must be r, w, x or a, optionally with b")
        files = self._at(cwd)

        async def start() -> Any:
            if mode.startswith("r"):
                session, found = await files._reading(path)
                reader = BinaryReader(files, session, path, found)
                return reader if mode == "rb" else TextFileReader(reader, encoding)
            writer = BinaryWriter(files, path, append=mode[0] == "a", exclusive=mode[0] == "x")
            await writer._prepare()
            return writer if mode.endswith("b") else TextFileWriter(writer, encoding)

        return Pending(start)

    def batch(self, *, cwd: str | None = None) -> Batch:
        """Collect many writes and send them in one request.

        ``async with`` sends them on exit; leaving by an exception sends nothing. Files are replaced one after
        another: a failure in the middle has the ``path`` that failed, and ``entries``, how many before it are
        in place. Its class is that of a single failed write, for example
        :class:`~sandkeep.errors.PathPermission`.

        Args:
            cwd: directory that relative paths start in; created if missing.
        """
        return Batch(self._at(cwd))

    # --- directories and entries -------------------------------------------------------------------------

    async def mkdir(
        self,
        path: str,
        *,
        mode: int = 0o755,
        parents: bool = False,
        exist_ok: bool = False,
        cwd: str | None = None,
    ) -> None:
        """Create a directory.

        Args:
            path: the directory.
            mode: its permission bits.
            parents: also create missing parent directories, and accept an existing directory.
            exist_ok: accept an existing directory.
            cwd: directory that a relative path starts in.

        Raises:
            PathExists: something is there already; also a file, with ``parents`` or ``exist_ok``.
            NotDirectory: a directory above it is a file.
            PathNotFound: a parent directory is missing.
        """
        try:
            made = await self._at(cwd)._do("mkdir", path, parents=parents, mode=mode, done=PathExists)
            if not made and not await self.is_dir(path, cwd=cwd):
                raise PathExists(f"mkdir {path}: the path exists already", path=path, operation="mkdir")
        except PathExists:
            if not exist_ok or not await self.is_dir(path, cwd=cwd):
                raise

    async def stat(self, path: str, *, follow_symlinks: bool = True, cwd: str | None = None) -> FileStat:
        """Return what is at a path.

        Raises:
            PathNotFound: nothing is there.
        """
        shown = decode(FileShown, await self._at(cwd)._do("stat", path, follow=follow_symlinks))
        return _stat(shown.file, path)

    async def exists(self, path: str, *, cwd: str | None = None) -> bool:
        """Whether the path exists; a symbolic link with a missing target does not."""
        return await self._kind(path, cwd) is not None

    async def is_file(self, path: str, *, cwd: str | None = None) -> bool:
        """Whether the path is a regular file, or a link to one."""
        found = await self._kind(path, cwd)
        return found is not None and found.is_file

    async def is_dir(self, path: str, *, cwd: str | None = None) -> bool:
        """Whether the path is a directory, or a link to one."""
        found = await self._kind(path, cwd)
        return found is not None and found.is_dir

    async def listdir(self, path: str = ".", *, cwd: str | None = None) -> list[FileStat]:
        """Return the entries of a directory, sorted by name; links are not followed.

        Raises:
            PathNotFound: the directory does not exist.
            NotDirectory: the path is not a directory.
        """
        shown = decode(FileList, await self._at(cwd)._do("list", path))
        return [_stat(entry, posixpath.join(path, entry.name)) for entry in shown.files]

    async def walk(
        self, path: str = ".", *, cwd: str | None = None
    ) -> AsyncGenerator[tuple[str, list[FileStat], list[FileStat]], None]:
        """Yield ``path`` and every directory below it, top down: path, directories, other entries.

        Remove directories from the second value to skip them. Directories that cannot be read are skipped.
        Links are not followed.
        """
        waiting = [path]
        while waiting:
            at = waiting.pop()
            try:
                entries = await self.listdir(at, cwd=cwd)
            except (PathNotFound, NotDirectory, PathPermission):
                if at == path:
                    raise
                continue  # removed since it was listed, or not readable for this user
            directories = [entry for entry in entries if entry.is_dir]
            yield at, directories, [entry for entry in entries if not entry.is_dir]
            waiting.extend(entry.path for entry in reversed(directories))

    async def glob(self, pattern: str, path: str = ".", *, cwd: str | None = None) -> list[str]:
        """Return the paths below a directory that match, sorted, relative to it. Skips what cannot be read.

        Args:
            pattern: as for ``pathlib``: ``*`` and ``?`` within a name, ``**`` for any number of directories.
            path: the directory to search.
            cwd: directory that a relative ``path`` starts in.
        """
        expect("pattern", pattern, str, "text")
        parts = [part for part in pattern.split("/") if part]
        if pattern.startswith("/") or not parts or ".." in parts:
            refuse("pattern", "must be relative and without '..'")
        found: set[str] = set()
        await self._at(cwd)._glob(path, "", parts, found)
        return sorted(found)

    async def rename(self, path: str, target: str, *, cwd: str | None = None) -> None:
        """Rename or move; replaces an existing file at ``target``. ``cwd`` applies to both paths."""
        await self._at(cwd)._do("rename", path, target=target)

    async def remove(
        self, path: str, *, recursive: bool = False, missing_ok: bool = False, cwd: str | None = None
    ) -> None:
        """Remove a file, a link or a directory.

        Args:
            path: what to remove.
            recursive: also remove everything below it; otherwise a directory must be empty.
            missing_ok: accept that the path does not exist.
            cwd: directory that a relative path starts in.

        Raises:
            PathNotFound: the path does not exist.
            PathExists: the directory is not empty.
        """
        await self._at(cwd)._do("remove", path, recursive=recursive, missingOk=missing_ok, done=PathNotFound)

    async def copy(self, path: str, target: str, *, cwd: str | None = None) -> int:
        """Copy a file with its mode; missing parent directories are created. ``cwd`` applies to both paths.

        Returns:
            The number of bytes copied.
        """
        response = await self._at(cwd)._do("copy", path, target=target, parents=True)
        return decode(Written, response).bytes_written

    async def chmod(self, path: str, mode: int, *, cwd: str | None = None) -> None:
        """Set the permission bits."""
        await self._at(cwd)._do("chmod", path, mode=mode)

    async def symlink(self, path: str, target: str, *, cwd: str | None = None) -> None:
        """Make ``path`` a symbolic link to ``target``; ``cwd`` applies to ``path`` only."""
        await self._at(cwd)._do("symlink", path, target=target)

    async def readlink(self, path: str, *, cwd: str | None = None) -> str:
        """Return the target of a symbolic link, unresolved."""
        return decode(LinkShown, await self._at(cwd)._do("readlink", path)).target

    async def realpath(self, path: str, *, strict: bool = False, cwd: str | None = None) -> str:
        """Return the absolute path without symbolic links, ``.`` and ``..``, as ``os.path.realpath``.

        Args:
            path: a path of the sandbox.
            strict: raise if a part of it does not exist, is not accessible or is a loop of links; otherwise
                such parts stay as they are.
            cwd: directory that a relative path starts in.

        Raises:
            PathNotFound: ``strict``, and the path does not exist.
        """
        return decode(PathShown, await self._at(cwd)._do("realpath", path, strict=strict)).path

    # --- transfers ---------------------------------------------------------------------------------------

    async def upload(
        self,
        source: str | os.PathLike[str],
        target: str,
        *,
        ignore: Sequence[str] = (),
        progress: Progress | None = None,
        cwd: str | None = None,
    ) -> Transferred:
        """Send a local file, or a directory with everything below it, in one request.

        A file is replaced atomically. Files of a directory are replaced one after another, and other files
        stay; modes and links are kept, owners are not. Pipes, sockets and devices are left out.

        Args:
            source: a local file or directory.
            target: the path it will have, not a directory to put it into.
            ignore: names, or paths below the directory, to leave out; ``*`` matches anything.
            progress: called from time to time with what was sent so far.
            cwd: directory that a relative ``target`` starts in.

        Returns:
            The number of files and bytes sent.

        Raises:
            FileNotFoundError: the local file does not exist.
            NotRegularFile: it is a pipe, a socket or a device.
            PathError: something cannot be written; ``path`` says what, and for a directory ``entries`` says
                how many entries are in place.
        """
        from sandkeep.sdk import local

        check_path("target", target)
        files = self._at(cwd)
        here = os.fspath(source)
        if os.path.isdir(here):
            return await files._upload_tree(here, target, ignore, progress)
        body = local.FileBody(here, progress)
        written = await files._put(target, body, mode=body.mode, size=body.size)
        return Transferred("", 1, written)

    async def download(
        self,
        source: str,
        target: str | os.PathLike[str],
        *,
        ignore: Sequence[str] = (),
        progress: Progress | None = None,
        cwd: str | None = None,
    ) -> Transferred:
        """Fetch a file, or a directory with everything below it, in one request.

        A file appears when it is complete. Complete files of a directory stay if the rest fails.

        Args:
            source: a file or directory of the sandbox.
            target: the local path it will have.
            ignore: names, or paths below the directory, to leave out; ``*`` matches anything. progress:
                called from time to time with what arrived so far. cwd: directory that a relative ``source``
                starts in.

        Returns:
            The number of files and bytes received.

        Raises:
            PathNotFound: the file does not exist in the sandbox.
            PathPermission: one file of a directory cannot be read; ``path`` names it. The others are
                complete.
            ArchiveError: several files cannot be read, or changed while they were read: ``path`` is the
                first, ``unreadable`` and ``changed`` have their names below the directory. The others are
                complete.
        """
        from sandkeep.sdk import local

        files = self._at(cwd)
        found = await files.stat(source)
        here = os.fspath(target)
        if found.is_dir:
            return await files._download_tree(source, here, ignore, progress)
        query = files._query(source)

        async def fetch(session: str) -> int:
            writer = local.FileWriter(here)
            try:
                async with (
                    self._transport.stream(
                        "GET", own(session, "content"), query=query, timeout=TRANSFER_SECONDS
                    ) as response,
                    aclosing(response.into(writer.fileno())) as added,
                ):
                    async for count in added:
                        writer.bytes += count
                        if progress is not None:
                            progress(Transferred(source, 0, writer.bytes))
                writer.finish(found.mode)
            except BaseException:
                writer.discard()
                raise
            return writer.bytes

        return Transferred("", 1, await self._fetched(fetch))

    async def watch(
        self, path: str = ".", *, recursive: bool = True, cwd: str | None = None
    ) -> AsyncGenerator[list[FileChange], None]:
        """Yield changes below a directory as they happen, until you stop iterating or the session ends.

        Args:
            path: the directory.
            recursive: watch everything below it, new directories too; otherwise only its own entries.
            cwd: directory that a relative path starts in.

        Yields:
            Lists of changes in the order they happened: ``created``, ``changed`` (content, time or mode) and
            ``removed``. A move is ``removed`` at one path and ``created`` at the other. The first list is
            empty: from then on nothing is missed. A change may be reported twice.

            If changes come faster than they can be reported, or the connection was lost for a while, there is
            an ``overflow`` with the path of the directory: changes were missed, so read the directory
            yourself. Watching goes on.

        Raises:
            PathNotFound: the directory does not exist. LimitReached: the session has 16 watches already, or
                there are more directories below ``path`` than can be watched.
            SessionStopped: the session has ended.

        Close the generator to end the watch, for example with ``contextlib.aclosing``.
        """
        files = self._at(cwd)
        session, _ = await files._reading(path)
        body = {"path": path, "recursive": recursive, **files._acting}
        async with aclosing(watched(self._transport, session, body)) as batches:
            async for changes in batches:
                yield changes

    # --- how ---------------------------------------------------------------------------------------------

    async def _upload_tree(
        self, root: str, target: str, ignore: Sequence[str], progress: Progress | None
    ) -> Transferred:
        absolute = target.startswith("/")
        prefix = "/".join(part for part in posixpath.normpath(target).split("/") if part not in ("", "."))
        if ".." in prefix.split("/"):
            refuse("target", "must not contain '..'")
        from sandkeep.sdk import local

        sent: list[TreeReader] = []

        def body() -> AsyncIterator[bytes]:
            sent.append(local.TreeReader(root, prefix, ignore, progress))
            return each(sent[-1].stream())

        with local.own_errors():
            await self._extract(body, absolute=absolute)
        return Transferred("", sent[-1].files, sent[-1].bytes)

    async def _download_tree(
        self, source: str, target: str, ignore: Sequence[str], progress: Progress | None
    ) -> Transferred:
        start = posixpath.join(self._acting.get("cwd", ""), source)
        body: dict[str, Any] = {**self._acting, "paths": ["."], "cwd": start, "report": True}
        if ignore:
            body["ignore"] = list(ignore)

        from sandkeep.sdk import local

        async def fetch(session: str) -> TreeWriter:
            writer = local.TreeWriter(target, progress)
            try:
                async with self._transport.stream(
                    "POST", own(session, "archive"), json=body, timeout=TRANSFER_SECONDS
                ) as response:
                    async for chunk in response.chunks:
                        writer.write(chunk)
                writer.finish()
            except BaseException:
                writer.discard()
                raise
            return writer

        done = await self._fetched(fetch)
        if done.report is not None:
            raise of_entry(done.report, "read", lambda entry: posixpath.join(source, entry))
        return Transferred("", done.files, done.bytes)

    async def _kind(self, path: str, cwd: str | None) -> FileStat | None:
        try:
            return await self.stat(path, cwd=cwd)
        except (PathNotFound, NotDirectory):
            return None
        except PathError as error:
            if error.details.get("errno") == errno.ELOOP:
                return None  # a loop of links has no target
            raise

    async def _glob(self, root: str, below: str, parts: list[str], found: set[str]) -> None:
        part, rest = parts[0], parts[1:]
        if part == "**":
            if rest:
                await self._glob(root, below, rest, found)
            elif below:
                found.add(below)
        try:
            entries = await self.listdir(posixpath.join(root, below) if below else root)
        except (PathNotFound, NotDirectory):
            return
        except PathPermission:
            if not below:
                raise
            return
        for entry in entries:
            name = posixpath.join(below, entry.name)
            if part == "**":
                if entry.is_dir:
                    await self._glob(root, name, parts, found)
            elif fnmatch.fnmatchcase(entry.name, part):
                if not rest:
                    found.add(name)
                elif entry.is_dir:
                    await self._glob(root, name, rest, found)


def _stat(shown: FileObject, path: str) -> FileStat:
    return FileStat(
        path=path,
        kind=shown.kind,
        size=shown.size,
        mode=shown.mode & 0o7777,
        uid=shown.uid,
        gid=shown.gid,
        modified_at=datetime.fromtimestamp(shown.mtime_ns / 1e9, UTC),
        target=shown.target if isinstance(shown.target, str) else None,
    )
