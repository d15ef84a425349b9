"""The files of a sandbox: names from ``os`` and ``pathlib``, paths inside the sandbox as text."""

from __future__ import annotations

import errno
import fnmatch
import os
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, overload

from sandkeep.errors import NotDirectory, PathError, PathExists, PathNotFound, PathPermission
from sandkeep.sdk._async.batch import Batch
from sandkeep.sdk._async.filerequests import TRANSFER_SECONDS, FileRequests, check_data, check_path, own
from sandkeep.sdk._async.openfile import BinaryReader, BinaryWriter, TextFileReader, TextFileWriter
from sandkeep.sdk._async.transport import each, read
from sandkeep.sdk._async.watching import watched
from sandkeep.sdk.concurrent import Opening
from sandkeep.sdk.values import FileChange, FileStat, Transferred
from sandkeep.types import expect, refuse
from sandkeep.wire.additions import FileList, FileObject, FileShown, LinkShown, Written

if TYPE_CHECKING:
    from sandkeep.sdk.local import Progress, TreeReader, TreeWriter

ReadMode = Literal["rb"]
WriteMode = Literal["wb", "ab", "xb"]
TextReadMode = Literal["r"]
TextWriteMode = Literal["w", "a", "x"]


class Files(FileRequests):
    """The filesystem of a sandbox.

    Relative paths start in the sandbox's working directory. Everything acts as the sandbox's user unless the
    handle came from :meth:`Sandbox.as_user`. Operations on a stopped sandbox resume it first.

    Failures are :class:`~sandkeep.errors.PathError` and its kinds, which name the path.
    """

    # --- whole files -------------------------------------------------------------------------------------

    async def read_bytes(self, path: str) -> bytes:
        """The content of a file.

        Raises:
            PathNotFound: there is none.
            IsDirectory: it is a directory.
        """

        async def fetch(session: str) -> bytes:
            return await self._transport.request(
                "GET", own(session, "content"), query=self._query(path), timeout=TRANSFER_SECONDS
            )

        return await self._recovery.run(fetch)

    async def read_text(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The content of a text file.

        Raises:
            UnicodeDecodeError: it is not in that encoding; give ``errors="replace"`` to read it anyway.
        """
        return (await self.read_bytes(path)).decode(encoding, errors)

    async def write_bytes(self, path: str, data: bytes, *, mode: int | None = None) -> int:
        """Replace a file, all of it or nothing. Missing parent directories are made.

        Args:
            path: where.
            data: its new content.
            mode: its permission bits; those it has, or 0644, when not given.

        Returns:
            The number of bytes written.

        Raises:
            NoSpace: the sandbox's disk is full.
        """
        check_data(data)
        return await self._put(path, bytes(data), mode=mode)

    async def write_text(
        self, path: str, text: str, *, mode: int | None = None, encoding: str = "utf-8"
    ) -> int:
        """Replace a text file, all of it or nothing; as :meth:`write_bytes`."""
        expect("text", text, str, "text")
        return await self.write_bytes(path, text.encode(encoding), mode=mode)

    @overload
    def open(
        self, path: str, mode: TextReadMode = "r", *, encoding: str = ...
    ) -> Opening[TextFileReader]: ...

    @overload
    def open(self, path: str, mode: TextWriteMode, *, encoding: str = ...) -> Opening[TextFileWriter]: ...

    @overload
    def open(self, path: str, mode: ReadMode) -> Opening[BinaryReader]: ...

    @overload
    def open(self, path: str, mode: WriteMode) -> Opening[BinaryWriter]: ...

    def open(self, path: str, mode: str = "r", *, encoding: str = "utf-8") -> Opening[Any]:
        """Open a file to stream its content, a piece at a time.

        A file opened for writing appears, or changes, when it is closed without an error: until then there is
        a draft beside it, which goes away when writing is given up (leaving ``async with`` by an exception
        does that). Appending writes through as it goes.

        Args:
            path: which file.
            mode: ``r``, ``w``, ``x`` (must not exist) or ``a``, with ``b`` for bytes.
            encoding: of text.

        Returns:
            A reader or writer: close it yourself, or use ``async with``.
        """
        check_path("path", path)
        expect("mode", mode, str, "text")
        if mode.removesuffix("b") not in ("r", "w", "x", "a"):
            refuse("mode", f"{mode!r} is not one of r, w, x and a, with or without b")

        async def start() -> Any:
            if mode.startswith("r"):
                reader = BinaryReader(self._transport, await self._reading(path), self._query(path))
                return reader if mode == "rb" else TextFileReader(reader, encoding)
            writer = BinaryWriter(self, path, append=mode[0] == "a", exclusive=mode[0] == "x")
            await writer.prepare()
            return writer if mode.endswith("b") else TextFileWriter(writer, encoding)

        return Opening(start)

    def batch(self) -> Batch:
        """Gather many writes and send them in one request.

        ``async with`` sends them on exit; leaving by an exception sends nothing. Files are replaced one after
        another: a failure in the middle names the entry, and those before it are in place.
        """
        return Batch(self)

    # --- directories and entries -------------------------------------------------------------------------

    async def mkdir(
        self, path: str, *, mode: int = 0o755, parents: bool = False, exist_ok: bool = False
    ) -> None:
        """Make a directory.

        Args:
            path: where.
            mode: its permission bits.
            parents: make missing directories above it too, and accept it being there.
            exist_ok: accept it being there.

        Raises:
            PathExists: something is there already.
            PathNotFound: a directory above it is missing.
        """
        try:
            await self._do("mkdir", path, parents=parents, mode=mode)
        except PathExists:
            if not exist_ok or not await self.is_dir(path):
                raise

    async def stat(self, path: str, *, follow_symlinks: bool = True) -> FileStat:
        """What is at a path.

        Raises:
            PathNotFound: nothing.
        """
        shown = read(FileShown, await self._do("stat", path, follow=follow_symlinks))
        return _stat(shown.file, path)

    async def exists(self, path: str) -> bool:
        """Whether something is there; a symbolic link that leads nowhere is not."""
        return await self._kind(path) is not None

    async def is_file(self, path: str) -> bool:
        """Whether it is a regular file, or a link to one."""
        found = await self._kind(path)
        return found is not None and found.is_file

    async def is_dir(self, path: str) -> bool:
        """Whether it is a directory, or a link to one."""
        found = await self._kind(path)
        return found is not None and found.is_dir

    async def listdir(self, path: str = ".") -> list[FileStat]:
        """The entries of a directory, sorted by name; links as links.

        Raises:
            PathNotFound: there is no such directory.
            NotDirectory: it is something else.
        """
        shown = read(FileList, await self._do("list", path))
        return [_stat(entry, posixpath.join(path, entry.name)) for entry in shown.files]

    async def walk(self, path: str = ".") -> AsyncGenerator[tuple[str, list[FileStat], list[FileStat]], None]:
        """Every directory below ``path`` and itself, from the top: its path, directories, other entries.

        Removing directories from the second value leaves them out, as are those that may not be read. Links
        are not followed.
        """
        waiting = [path]
        while waiting:
            at = waiting.pop()
            try:
                entries = await self.listdir(at)
            except (PathNotFound, NotDirectory, PathPermission):
                if at == path:
                    raise
                continue  # it went away meanwhile, or is not for this user
            directories = [entry for entry in entries if entry.is_dir]
            yield at, directories, [entry for entry in entries if not entry.is_dir]
            waiting.extend(entry.path for entry in reversed(directories))

    async def glob(self, pattern: str, path: str = ".") -> list[str]:
        """Paths below a directory that match, sorted, relative to it. What may not be read is passed over.

        Args:
            pattern: as for ``pathlib``: ``*`` and ``?`` within a name, ``**`` for any number of directories.
            path: where to look.
        """
        expect("pattern", pattern, str, "text")
        parts = [part for part in pattern.split("/") if part]
        if pattern.startswith("/") or not parts or ".." in parts:
            refuse("pattern", "must be a relative pattern without ..")
        found: set[str] = set()
        await self._glob(path, "", parts, found)
        return sorted(found)

    async def rename(self, path: str, target: str) -> None:
        """Rename or move; replaces a file that is at ``target``."""
        await self._do("rename", path, target=target)

    async def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Remove a file, a link or a directory.

        Args:
            path: what.
            recursive: with everything below it; otherwise a directory must be empty.
            missing_ok: accept that it is not there.

        Raises:
            PathNotFound: it is not there.
            PathExists: the directory is not empty.
        """
        await self._do("remove", path, recursive=recursive, missingOk=missing_ok)

    async def copy(self, path: str, target: str) -> int:
        """Copy a file with its mode; missing parent directories are made.

        Returns:
            The number of bytes.
        """
        return read(Written, await self._do("copy", path, target=target, parents=True)).bytes_written

    async def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits."""
        await self._do("chmod", path, mode=mode)

    async def symlink(self, path: str, target: str) -> None:
        """Make ``path`` a symbolic link that says ``target``."""
        await self._do("symlink", path, target=target)

    async def readlink(self, path: str) -> str:
        """What a symbolic link says."""
        return read(LinkShown, await self._do("readlink", path)).target

    # --- transfers ---------------------------------------------------------------------------------------

    async def upload(
        self,
        source: str | os.PathLike[str],
        target: str,
        *,
        ignore: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Transferred:
        """Send a local file, or a directory with everything below it, in one request.

        A file is replaced all at once. Of a directory, files are replaced one after another and others stay;
        modes and links are kept, owners are not. Pipes, sockets and devices in it are left out.

        Args:
            source: a local file or directory.
            target: where it goes: the path it will have, not a directory to put it into.
            ignore: names, or paths below the directory, to leave out; ``*`` matches anything.
            progress: called now and then with what was sent so far.

        Returns:
            How many files and bytes were sent.

        Raises:
            FileNotFoundError: there is no such local file.
            NotRegularFile: it is a pipe, a socket or a device.
        """
        from sandkeep.sdk import local

        check_path("target", target)
        here = os.fspath(source)
        if os.path.isdir(here):
            return await self._upload_tree(here, target, ignore, progress)
        body = local.FileBody(here, progress)
        written = await self._put(target, body, mode=body.mode, size=body.size)
        return Transferred("", 1, written)

    async def download(
        self,
        source: str,
        target: str | os.PathLike[str],
        *,
        ignore: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Transferred:
        """Fetch a file, or a directory with everything below it, in one request.

        A file appears when it is complete. Of a directory, complete files stay when the rest fails.

        Args:
            source: a file or directory of the sandbox.
            target: the local path it will have.
            ignore: names, or paths below the directory, to leave out; ``*`` matches anything.
            progress: called now and then with what arrived so far.

        Returns:
            How many files and bytes arrived.

        Raises:
            PathNotFound: there is no such file in the sandbox.
        """
        from sandkeep.sdk import local

        found = await self.stat(source)
        here = os.fspath(target)
        if found.is_dir:
            return await self._download_tree(source, here, ignore, progress)

        async def fetch(session: str) -> int:
            writer = local.FileWriter(here)
            try:
                async with (
                    self._transport.stream(
                        "GET", own(session, "content"), query=self._query(source), timeout=TRANSFER_SECONDS
                    ) as answer,
                    aclosing(answer.into(writer.fileno())) as added,
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

        return Transferred("", 1, await self._recovery.run(fetch))

    async def watch(
        self, path: str = ".", *, recursive: bool = True
    ) -> AsyncGenerator[list[FileChange], None]:
        """What changes below a directory, as it happens; until you stop iterating, or the session ends.

        Args:
            path: which directory.
            recursive: everything below it, new directories too; otherwise its own entries only.

        Yields:
            Changes in the order they happened, those of a moment together: ``created``, ``changed`` (content,
            time or mode) and ``removed``. Moving is ``removed`` at one path and ``created`` at the other. The
            first list is empty: from there on nothing is missed. Something may be told twice.

            When more happens than can be told, or the connection was lost for a while, there is an
            ``overflow`` with the path of the directory: changes were missed, so look for yourself. Watching
            goes on.

        Raises:
            PathNotFound: there is no such directory.
            LimitReached: there are more directories below it than can be watched.
            SessionStopped: the session has ended.

        Nothing is left behind when the generator is closed; ``contextlib.aclosing`` does that in time.
        """
        session = await self._reading(path)
        body = {"path": path, "recursive": recursive, **self._acting}
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
            refuse("target", "must not have .. in it")
        from sandkeep.sdk import local

        sent: list[TreeReader] = []

        def body() -> AsyncIterator[bytes]:
            sent.append(local.TreeReader(root, prefix, ignore, progress))
            return each(sent[-1].stream())

        await self._extract(body, cwd="/" if absolute else None)
        return Transferred("", sent[-1].files, sent[-1].bytes)

    async def _download_tree(
        self, source: str, target: str, ignore: Sequence[str], progress: Progress | None
    ) -> Transferred:
        body: dict[str, Any] = {"paths": ["."], "cwd": source, **self._acting}
        if ignore:
            body["ignore"] = list(ignore)

        from sandkeep.sdk import local

        async def fetch(session: str) -> TreeWriter:
            writer = local.TreeWriter(target, progress)
            try:
                async with self._transport.stream(
                    "POST", own(session, "archive"), json=body, timeout=TRANSFER_SECONDS
                ) as answer:
                    async for piece in answer.pieces:
                        writer.write(piece)
                writer.finish()
            except BaseException:
                writer.discard()
                raise
            return writer

        done = await self._recovery.run(fetch)
        return Transferred("", done.files, done.bytes)

    async def _kind(self, path: str) -> FileStat | None:
        try:
            return await self.stat(path)
        except (PathNotFound, NotDirectory):
            return None
        except PathError as error:
            if error.details.get("errno") == errno.ELOOP:
                return None  # links that lead to each other lead nowhere
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
