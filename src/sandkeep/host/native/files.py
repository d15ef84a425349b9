"""Files of a session: typed requests to its supervisor."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sandkeep.errors import HostCannot, InvalidRequest
from sandkeep.host.control import Control, Download, Upload
from sandkeep.host.driver import DEFAULT_ACTING, Acting, WriteOptions
from sandkeep.host.reports import FileChange, FileLines, FileStat, TreeEntry

_DEFAULT_WRITE = WriteOptions()


class NativeFiles:
    """See `sandkeep.host.driver.Files`."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def _do(
        self, operation: str, acting: Acting, *, data: AsyncIterable[bytes] | None = None, **body: Any
    ) -> dict[str, Any]:
        answer, _ = await self._control.files(operation, data=data, **body, **_fields(acting))
        return answer

    async def stat(self, path: str, acting: Acting = DEFAULT_ACTING, *, follow: bool = True) -> FileStat:
        return FileStat.from_json(await self._do("stat", acting, path=path, follow=follow))

    async def list(self, path: str, acting: Acting = DEFAULT_ACTING) -> Sequence[FileStat]:
        _, content = await self._control.files("list", path=path, **_fields(acting))
        return [FileStat.from_json(entry) for line in content.splitlines() for entry in json.loads(line)]

    async def mkdir(
        self, path: str, acting: Acting = DEFAULT_ACTING, *, mode: int = 0o755, parents: bool = False
    ) -> None:
        await self._do("mkdir", acting, path=path, mode=mode, parents=parents)

    async def rename(
        self, path: str, target: str, acting: Acting = DEFAULT_ACTING, *, replace: bool = True
    ) -> None:
        await self._do("rename", acting, path=path, target=target, replace=replace)

    async def remove(
        self,
        path: str,
        acting: Acting = DEFAULT_ACTING,
        *,
        recursive: bool = False,
        missing_ok: bool = False,
    ) -> None:
        await self._do("remove", acting, path=path, recursive=recursive, missing_ok=missing_ok)

    async def symlink(self, path: str, target: str, acting: Acting = DEFAULT_ACTING) -> None:
        await self._do("symlink", acting, path=path, target=target)

    async def readlink(self, path: str, acting: Acting = DEFAULT_ACTING) -> str:
        return str((await self._do("readlink", acting, path=path))["target"])

    async def realpath(self, path: str, acting: Acting = DEFAULT_ACTING, *, strict: bool = False) -> str:
        with _since("realpath"):
            return str((await self._do("realpath", acting, path=path, strict=strict))["path"])

    async def chmod(self, path: str, mode: int, acting: Acting = DEFAULT_ACTING) -> None:
        await self._do("chmod", acting, path=path, mode=mode)

    async def chown(
        self, path: str, uid: int, gid: int, acting: Acting = DEFAULT_ACTING, *, follow: bool = True
    ) -> None:
        await self._do("chown", acting, path=path, uid=uid, gid=gid, follow=follow)

    async def copy(
        self, path: str, target: str, acting: Acting = DEFAULT_ACTING, *, parents: bool = False
    ) -> int:
        answer = await self._do("copy", acting, path=path, target=target, parents=parents)
        return int(answer["bytes_written"])

    async def write(
        self,
        path: str,
        data: AsyncIterable[bytes],
        acting: Acting = DEFAULT_ACTING,
        options: WriteOptions = _DEFAULT_WRITE,
    ) -> int:
        answer = await self._do("write", acting, data=data, path=path, **_written(options))
        return int(answer["bytes_written"])

    async def extract(
        self,
        path: str,
        data: AsyncIterable[bytes],
        acting: Acting = DEFAULT_ACTING,
        *,
        keep_owner: bool = False,
    ) -> int:
        answer = await self._do("extract", acting, data=data, path=path, keep_owner=keep_owner)
        return int(answer["entries"])

    async def open_read(
        self,
        path: str,
        acting: Acting = DEFAULT_ACTING,
        *,
        offset: int = 0,
        length: int | None = None,
        direct: bool = False,
    ) -> Download:
        return await self._control.open_read(
            direct=direct, path=path, offset=offset, **_given(length=length), **_fields(acting)
        )

    async def lines(
        self, path: str, acting: Acting = DEFAULT_ACTING, *, start: int, limit: int, max_bytes: int
    ) -> FileLines:
        with _since("lines"):
            answer, data = await self._control.files(
                "lines", path=path, start=start, limit=limit, max_bytes=max_bytes, **_fields(acting)
            )
        return FileLines(data, answer["lines"], answer["more"], answer["cut"])

    async def open_write(
        self, path: str, acting: Acting = DEFAULT_ACTING, options: WriteOptions = _DEFAULT_WRITE
    ) -> Upload | None:
        return await self._control.open_write(path=path, **_written(options), **_fields(acting))

    def archive(
        self, paths: Sequence[str], acting: Acting = DEFAULT_ACTING, *, ignore: Sequence[str] = ()
    ) -> AsyncIterator[bytes]:
        return self._control.read("archive", paths=[*paths], ignore=[*ignore], **_fields(acting))

    async def tree(
        self,
        path: str,
        acting: Acting = DEFAULT_ACTING,
        *,
        ignore: Sequence[str] = (),
        checksum: bool = False,
    ) -> AsyncIterator[Sequence[TreeEntry]]:
        with _since("tree"):
            async for line in self._control.read(
                "tree", path=path, ignore=[*ignore], checksum=checksum, **_fields(acting)
            ):
                yield [TreeEntry(**entry) for entry in json.loads(line)]

    async def tree_remove(
        self, path: str, names: Sequence[str], acting: Acting = DEFAULT_ACTING
    ) -> Sequence[str]:
        with _since("tree_remove"):
            answer = await self._do("tree_remove", acting, path=path, names=[*names])
        return [str(name) for name in answer["kept"]]

    async def tree_archive(
        self, path: str, names: Sequence[str], acting: Acting = DEFAULT_ACTING
    ) -> AsyncIterator[bytes]:
        with _since("tree_archive"):
            async for piece in self._control.read(
                "tree_archive", path=path, names=[*names], **_fields(acting)
            ):
                yield piece

    async def tree_extract(
        self, path: str, data: AsyncIterable[bytes], acting: Acting = DEFAULT_ACTING
    ) -> int:
        with _since("tree_extract"):
            answer = await self._do("tree_extract", acting, data=data, path=path)
        return int(answer["entries"])

    async def watch(
        self, path: str, acting: Acting = DEFAULT_ACTING, *, recursive: bool = True
    ) -> AsyncIterator[Sequence[FileChange]]:
        async for line in self._control.read("watch", path=path, recursive=recursive, **_fields(acting)):
            yield [FileChange.from_json(change) for change in json.loads(line)]


@contextmanager
def _since(operation: str) -> Iterator[None]:
    """Translate the error of a supervisor that is older than ``operation`` into one with a hint."""
    try:
        yield
    except InvalidRequest as error:
        if error.details.get("field") != "op":
            raise
        raise HostCannot(
            f"the session's supervisor is of an earlier version, which does not know {operation}",
            part="supervisor protocol",
            why=f"the supervisor does not know fs.{operation}",
            hint="stop the sandbox; its next session has a supervisor of this version",
        ) from error


def _given(**body: Any) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _fields(acting: Acting) -> dict[str, Any]:
    return _given(user=acting.user, root=acting.root or None, cwd=acting.cwd)


def _written(options: WriteOptions) -> dict[str, Any]:
    flags = {"parents": options.parents, "append": options.append, "exclusive": options.exclusive}
    return flags | _given(mode=options.mode, size=options.size)
