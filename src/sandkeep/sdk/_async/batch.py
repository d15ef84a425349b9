"""Many writes in one request."""

from __future__ import annotations

import posixpath
import time
from types import TracebackType
from typing import TYPE_CHECKING

from sandkeep.sdk._async.filerequests import check_data, check_path
from sandkeep.types import expect, refuse

if TYPE_CHECKING:
    from sandkeep.sdk._async.filerequests import FileRequests


class Batch:
    """Writes that are gathered and sent together. Made by :meth:`Files.batch`."""

    def __init__(self, files: FileRequests) -> None:
        self._files = files
        self._entries: dict[str, tuple[bytes, int]] = {}

    def write_bytes(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Add a file. A later one at the same path replaces it."""
        check_path("path", path)
        check_data(data)
        if not path or path.endswith("/") or ".." in path.split("/"):
            refuse("path", f"{path!r} is not the path of a file, or has .. in it")
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
        """Send what was gathered so far and begin anew."""
        from sandkeep.sdk import tarball

        entries, self._entries = self._entries, {}
        now = int(time.time())
        for absolute in (False, True):
            chosen = {path: entry for path, entry in entries.items() if path.startswith("/") is absolute}
            if chosen:
                parts = [
                    tarball.file(posixpath.normpath(path).lstrip("/"), data, mode, mtime=now)
                    for path, (data, mode) in chosen.items()
                ]
                await self._files._extract(b"".join((*parts, tarball.END)), cwd="/" if absolute else None)
