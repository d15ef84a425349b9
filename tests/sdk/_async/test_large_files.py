"""Large files up and down: moved by the kernel over a unix socket, in pieces over TCP."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import sandkeep
from sandkeep import Transferred
from sandkeep.errors import TransportError
from tests.server.server_process import ServerProcess

pytestmark = pytest.mark.anyio

SIZE = (5 << 20) + 321


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    content = os.urandom(SIZE)
    (tmp_path / "big").write_bytes(content)
    return content


@pytest.mark.parametrize("way", ["unix", "tcp"])
async def test_a_file_comes_back_as_it_was(
    tmp_path: Path, content: bytes, server: ServerProcess, way: str
) -> None:
    at, token = (server.url, server.token) if way == "tcp" else (None, None)
    async with sandkeep.Client(at, token=token) as client, client.create_sandbox() as box:
        (tmp_path / "big").chmod(0o640)
        steps: list[Transferred] = []
        for _ in range(2):
            up = await box.fs.upload(tmp_path / "big", "up/big", progress=steps.append)
            assert (up.files, up.bytes) == (1, SIZE)
            assert steps[-1].bytes == SIZE
            down = await box.fs.download("up/big", tmp_path / "got", progress=steps.append)
            assert (down.files, down.bytes) == (1, SIZE)
            assert steps[-1].bytes == SIZE
            assert (tmp_path / "got").read_bytes() == content
            assert (tmp_path / "got").stat().st_mode & 0o777 == 0o640
        assert await box.fs.read_bytes("up/big") == content


async def test_a_file_that_grows_is_sent_as_long_as_it_was(tmp_path: Path, content: bytes) -> None:
    async with sandkeep.create_sandbox() as box:

        def grow(step: Transferred) -> None:
            with open(tmp_path / "big", "ab") as out:
                out.write(b"more")

        done = await box.fs.upload(tmp_path / "big", "grown", progress=grow)
        assert done.bytes == SIZE
        assert await box.fs.read_bytes("grown") == content


async def test_a_file_that_shrinks_is_not_sent_at_all(tmp_path: Path, content: bytes) -> None:
    async with sandkeep.create_sandbox() as box:

        def shrink(step: Transferred) -> None:
            os.truncate(tmp_path / "big", 10)

        with pytest.raises(TransportError, match="became shorter"):
            await box.fs.upload(tmp_path / "big", "shrunk", progress=shrink)
        assert not await box.fs.exists("shrunk")
        assert len(content) == SIZE


async def test_a_download_that_fails_leaves_nothing(tmp_path: Path) -> None:
    async with sandkeep.create_sandbox() as box:
        await box.run_process("truncate", ["-s", "100M", "sparse"], check=True)
        (tmp_path / "here").mkdir()

        class Enough(Exception):
            pass

        def stop(step: Transferred) -> None:
            raise Enough

        with pytest.raises(Enough):
            await box.fs.download("sparse", tmp_path / "here" / "sparse", progress=stop)
        assert os.listdir(tmp_path / "here") == []
        done = await box.fs.download("sparse", tmp_path / "here" / "sparse")
        assert done.bytes == 100 << 20
