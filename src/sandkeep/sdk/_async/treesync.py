"""Making a tree of a sandbox like a local one, or the reverse, by moving only what differs."""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from sandkeep.errors import ArchiveError, PathExists, PathNotFound, PathPermission, StreamClosed
from sandkeep.sdk._async.filerequests import TRANSFER_SECONDS, FileRequests, of_entry, own
from sandkeep.sdk._async.transport import decode, each, records
from sandkeep.sdk._compat_async import in_thread
from sandkeep.sdk.comparing import Entries, SyncEntry, SyncPlan, above, alike, plan, remove_local, scan
from sandkeep.sdk.local import ChosenReader, TreeWriter, own_errors
from sandkeep.sdk.values import Synced, given
from sandkeep.states import FileKind
from sandkeep.wire.base import encode
from sandkeep.wire.errors import exception
from sandkeep.wire.v1 import TreeRecord, TreeRemoved

if TYPE_CHECKING:
    from sandkeep.sdk.local import Progress

_NAMES = 50_000
_TEXT = 1 << 20
"""Most names, and characters of names, in one request."""
_OWNER = 0o300
"""Permissions that a user needs of a directory to change what is in it."""


class How(NamedTuple):
    """The options of a sync."""

    delete: bool
    patterns: Sequence[str]
    checksum: bool
    dry_run: bool
    progress: Progress | None


class TreeSync:
    """One sync of a local tree and a tree of a sandbox."""

    def __init__(self, files: FileRequests, here: str, there: str, how: How) -> None:
        self._files = files
        self._here = here
        self._there = there
        self._how = how

    async def send(self) -> Synced:
        """Make the sandbox's tree like the local one."""
        here = await self._scan()
        try:
            listed: Entries | None = await self._list()
        except PathNotFound:
            listed = None
        there = listed or {}
        found = await self._plan(here, there, least=0)
        if self._how.dry_run:
            return _result(found)
        kept: set[str] = set()
        for names in _groups(found.remove):
            kept |= await self._remove(names)
        _check_way(found, kept, self._there)
        missing: set[str] = set()
        if found.copy or listed is None:
            missing = await self._upload(_sendable(found.copy, here, there))
        return _result(found, kept, missing)

    async def receive(self) -> Synced:
        """Make the local tree like the sandbox's."""
        there = await self._list()
        for name, entry in there.items():
            if entry.unreadable:
                path = posixpath.join(self._there, name)
                raise PathPermission(
                    f"list {path}: the directory cannot be read",
                    path=path,
                    operation="list",
                    hint="leave it out with ignore, or act as another user",
                )
        exists = os.path.lexists(self._here)
        here = await self._scan() if exists else {}
        # What is received can be changed by its owner, also if its directories did not allow that.
        found = await self._plan(there, here, least=0o700)
        if self._how.dry_run:
            return _result(found)
        kept: set[str] = set()

        def remove(root: str) -> None:
            os.makedirs(root, exist_ok=True)
            kept.update(remove_local(root, found.remove))

        await in_thread(remove, self._here)
        _check_way(found, kept, self._here)
        for names in _groups(found.copy):
            await self._download(names)
        return _result(found, kept)

    # --- what is there -----------------------------------------------------------------------------------

    async def _scan(self) -> Entries:
        found: Entries = {}

        def work(root: str) -> None:
            found.update(scan(root, self._how.patterns))

        await in_thread(work, self._here)
        return found

    async def _list(self) -> Entries:
        body: dict[str, Any] = {"path": self._there, **self._files._acting}
        body |= {"ignore": list(self._how.patterns), "checksum": self._how.checksum}

        async def fetch(session: str) -> Entries:
            found: Entries = {}
            async with (
                self._files._transport.stream(
                    "POST", own(session, "tree"), json=body, timeout=TRANSFER_SECONDS
                ) as response,
                aclosing(records(TreeRecord, response)) as lines,
            ):
                async for line in lines:
                    if isinstance(line.error, dict):
                        raise exception(200, encode({"error": line.error}))
                    found.update(_entries(line))
                    if line.end:
                        return found
            raise StreamClosed("the server did not list the tree to its end", session=session)

        return await self._files._fetched(fetch)

    async def _plan(self, source: Entries, target: Entries, *, least: int) -> SyncPlan:
        found: list[SyncPlan] = []

        def work(root: str) -> None:
            same = alike(root, checksum=self._how.checksum, least=least)
            found.append(plan(source, target, same, delete=self._how.delete))

        await in_thread(work, self._here)
        return found[0]

    # --- changing it -------------------------------------------------------------------------------------

    async def _remove(self, names: Sequence[str]) -> set[str]:
        response = await self._files._do("tree/remove", self._there, names=list(names))
        return set(decode(TreeRemoved, response).kept)

    async def _upload(self, chosen: dict[str, FileKind]) -> set[str]:
        """Send entries; return those that are gone meanwhile."""
        start = posixpath.join(self._files._acting.get("cwd", ""), self._there)
        query = {**self._files._acting, "cwd": start}
        readers: list[ChosenReader] = []

        def body() -> AsyncIterator[bytes]:
            readers.append(ChosenReader(self._here, chosen, self._how.progress))
            return each(readers[-1].stream())

        async def send(session: str) -> None:
            await self._files._transport.request(
                "PUT",
                own(session, "tree/archive"),
                query=query,
                body=body,
                headers={"Content-Type": "application/x-tar"},
                replay=True,
                timeout=TRANSFER_SECONDS,
            )

        try:
            with own_errors():
                await self._files._recovery.run(send)
        except ArchiveError as error:
            raise of_entry(error, "write", lambda entry: posixpath.join(self._there, entry)) from error
        return readers[-1].missing

    async def _download(self, names: Sequence[str]) -> None:
        body = {"path": self._there, "names": list(names), **self._files._acting}

        async def fetch(session: str) -> TreeWriter:
            writer = TreeWriter(self._here, self._how.progress, exact=True)
            try:
                async with self._files._transport.stream(
                    "POST", own(session, "tree/archive"), json=body, timeout=TRANSFER_SECONDS
                ) as response:
                    async for chunk in response.chunks:
                        writer.write(chunk)
                writer.finish()
            except BaseException:
                writer.discard()
                raise
            return writer

        done = await self._files._fetched(fetch)
        if done.report is not None:
            raise of_entry(done.report, "read", lambda entry: posixpath.join(self._there, entry))


def _entries(line: TreeRecord) -> Iterator[tuple[str, SyncEntry]]:
    for shown in line.entries:
        yield (
            shown.path,
            SyncEntry(
                shown.kind,
                shown.size,
                shown.mode,
                shown.mtime_ns,
                given(shown.target),
                given(shown.digest),
                bool(given(shown.unreadable)),
            ),
        )


def _sendable(copy: Sequence[str], here: Entries, there: Entries) -> dict[str, FileKind]:
    """Return the entries to send, in order.

    They include directories that their owner cannot write to now: unpacking such an entry allows it until the
    end.
    """
    chosen: dict[str, FileKind] = {}
    for path in copy:
        for directory in reversed([*above(path)]):
            found = there.get(directory)
            if found is not None and found.mode & _OWNER != _OWNER:
                chosen.setdefault(directory, FileKind.DIRECTORY)
        chosen[path] = here[path].kind
    return chosen


def _groups(names: Sequence[str]) -> Iterator[list[str]]:
    """Split names into lists that fit into a request each."""
    group: list[str] = []
    size = 0
    for name in names:
        group.append(name)
        size += len(name)
        if len(group) == _NAMES or size >= _TEXT:
            yield group
            group, size = [], 0
    if group:
        yield group


def _check_way(found: SyncPlan, kept: set[str], root: str) -> None:
    """Raise if a directory stayed that something else has to replace: what is ignored is in it."""
    for name in sorted(found.in_the_way & kept):
        path = posixpath.join(root, name)
        raise PathExists(
            f"sync {path}: the directory has entries that are ignored or new, and a file has to be there",
            path=path,
            operation="sync",
            errno=errno.EEXIST,
        )


def _result(found: SyncPlan, kept: Collection[str] = (), missing: Collection[str] = ()) -> Synced:
    return Synced(
        copied=tuple(path for path in found.copy if path not in missing),
        deleted=tuple(path for path in found.remove if path not in found.in_the_way and path not in kept),
        unchanged=found.unchanged,
        bytes=found.bytes,
        left_out=tuple(found.left_out),
    )
