"""Many writes in one request."""

from __future__ import annotations

import posixpath
import time
from types import TracebackType
from typing import TYPE_CHECKING

from sandkeep.checks import expect, refuse
from sandkeep.sdk._async.filerequests import check_data, check_path
from sandkeep.sdk._compat_async import OwnWith

if TYPE_CHECKING:
    from sandkeep.sdk._async.filerequests import FileRequests


class Batch(OwnWith):
    """Writes that are collected and sent together. Made by :meth:`Files.batch`."""

    def __init__(self, files: FileRequests) -> None:
        self._files = files
        self._entries: dict[str, tuple[bytes, int]] = {}

    def write_bytes(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Add a file. A later one at the same path replaces it."""
        check_path("path", path)
        check_data(data)
        if not path or path.endswith("/") or ".." in path.split("/"):
            refuse("path", f"{path!r} must be the path of a file, without '..'")
        expect("mode", mode, int, "a number such as 0o644")
        self._entries[path] = (bytes(data), mode)

    def write_text(self, path: str, text: str, *, mode: int = 0o644, encoding: str = "utf-8") -> None:
        """Add a text file."""
        expect("text", text, str, "text")
        self.write_bytes(path, text.encode(encoding), mode=mode)

    def __len__(self) -> int:
        return len(self._entries)

    async def __aenter__(self) -> Batch:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.send()

    async def send(self) -> None:
        """Send the writes collected so far, and start again with none."""
        from sandkeep.sdk import tarball

        entries, self._entries = self._entries, {}
        now = int(time.time())
        done = 0
        for absolute in (False, True):
            chosen = {path: entry for path, entry in entries.items() if path.startswith("/") is absolute}
            if chosen:
                named = {posixpath.normpath(path).lstrip("/"): path for path in chosen}
                parts = [tarball.file(name, *chosen[path], mtime=now) for name, path in named.items()]
                body = b"".join((*parts, tarball.END))
                await self._files._extract(body, absolute=absolute, named=named, before=done)
                done += len(named)
