"""The part of :class:`Files` that makes a local directory and one of the sandbox alike."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sandkeep.checks import expect
from sandkeep.sdk._async.filerequests import FileRequests, check_path
from sandkeep.sdk.bodies import Texts
from sandkeep.sdk.values import Synced

if TYPE_CHECKING:
    from sandkeep.sdk._async.treesync import TreeSync
    from sandkeep.sdk.local import Progress


class SyncedFiles(FileRequests):
    """Sync in both directions."""

    async def sync_to(
        self,
        source: str | os.PathLike[str],
        target: str,
        *,
        delete: bool = False,
        ignore: Texts = (),
        ignore_from: str | os.PathLike[str] | None = None,
        checksum: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
        cwd: str | None = None,
    ) -> Synced:
        """Make a directory of the sandbox like a local one; send only what differs.

        One request lists the directory of the sandbox, one removes what has to go, and one sends what
        differs. Files differ in size, time (to 100 ns) or permissions, links in their target, directories in
        permissions. Times of files, permissions and links are kept, owners and times of directories are not;
        links are copied as links and never followed. Files are replaced one after another, each at once: a
        sync that was interrupted is finished by the next.

        Args:
            source: a local directory.
            target: the directory of the sandbox; it is made if it is missing.
            delete: remove what the source does not have. A directory that is not empty gives way to a file
                only with this.
            ignore: patterns of what neither side sends or deletes, as in ``.gitignore``: ``*``, ``?``,
                ``[a-z]``, ``**``, ``/`` at the beginning for the top, ``/`` at the end for directories, ``!``
                to take one back; the last that matches decides.
            ignore_from: a local file with such patterns, one per line, which come before ``ignore``. Files of
                that kind inside the tree mean nothing.
            checksum: read all files on both sides, and compare content instead of times.
            dry_run: change nothing; only say what would be done.
            progress: called from time to time with what was sent so far.
            cwd: directory that a relative ``target`` starts in.

        Returns:
            What was copied, deleted and left as it was.

        Raises:
            FileNotFoundError: the local directory does not exist.
            PathExists: a directory that is not empty is where a file has to be, without ``delete`` or with
                ignored files in it.
            PathError: something cannot be written or removed; ``path`` says what.
            InvalidRequest: a pattern is invalid.
        """
        work = self._sync(source, target, cwd, delete, ignore, ignore_from, checksum, dry_run, progress)
        return await work.send()

    async def sync_from(
        self,
        source: str,
        target: str | os.PathLike[str],
        *,
        delete: bool = False,
        ignore: Texts = (),
        ignore_from: str | os.PathLike[str] | None = None,
        checksum: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
        cwd: str | None = None,
    ) -> Synced:
        """Make a local directory like one of the sandbox; fetch only what differs.

        As :meth:`sync_to`, in the other direction. Directories keep all permissions of their owner. Nothing
        is written outside ``target``.

        Args:
            source: a directory of the sandbox.
            target: the local directory; it is made if it is missing.
            delete: remove what the source does not have, from the local directory.
            ignore: patterns of what is neither fetched nor deleted; see :meth:`sync_to`.
            ignore_from: a local file with such patterns, which come before ``ignore``.
            checksum: read all files on both sides, and compare content instead of times.
            dry_run: change nothing; only say what would be done.
            progress: called from time to time with what arrived so far.
            cwd: directory that a relative ``source`` starts in.

        Returns:
            What was copied, deleted and left as it was.

        Raises:
            PathNotFound: the directory does not exist in the sandbox.
            PathPermission: a directory or a file there cannot be read; ``path`` names it. An unreadable file
                does not keep the others from being fetched.
            PathExists: a local directory that is not empty is where a file has to be.
        """
        work = self._sync(target, source, cwd, delete, ignore, ignore_from, checksum, dry_run, progress)
        return await work.receive()

    def _sync(
        self,
        here: str | os.PathLike[str],
        there: str,
        cwd: str | None,
        delete: bool,
        ignore: Texts,
        ignore_from: str | os.PathLike[str] | None,
        checksum: bool,
        dry_run: bool,
        progress: Progress | None,
    ) -> TreeSync:
        from sandkeep.sdk._async.treesync import How, TreeSync
        from sandkeep.sdk.comparing import read_patterns

        check_path("path", there)
        for name, value in (("delete", delete), ("checksum", checksum), ("dry_run", dry_run)):
            expect(name, value, bool, "true or false")
        patterns = read_patterns(ignore, ignore_from)
        how = How(delete, patterns, checksum, dry_run, progress)
        return TreeSync(self._at(cwd), os.fspath(here), there, how)
