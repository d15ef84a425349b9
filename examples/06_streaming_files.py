"""Move files of any size with little memory: stream both ways, send and fetch trees, watch for changes."""

import asyncio
import hashlib
import tempfile
from contextlib import aclosing
from pathlib import Path

import sandkeep


async def main() -> None:
    async with sandkeep.create_sandbox() as box:
        digest = hashlib.sha256()
        async with box.fs.open("big.bin", "wb") as out:
            for number in range(64):
                piece = bytes([number]) * (1 << 17)
                digest.update(piece)
                await out.write(piece)
        inside = await box.run_process("sha256sum", ["big.bin"], check=True, capture_output=True)
        print("same digest inside:", inside.stdout_text.split()[0] == digest.hexdigest())

        again = hashlib.sha256()
        async with box.fs.open("big.bin", "rb") as source:
            async for piece in source.chunks():
                again.update(piece)
        print("same digest back:", again.hexdigest() == digest.hexdigest())

        async with box.fs.batch() as batch:
            for number in range(100):
                batch.write_text(f"tree/{number:03}", f"file {number}")
        with tempfile.TemporaryDirectory() as directory:
            done = await box.fs.download("tree", Path(directory, "tree"))
            print("fetched", done.files, "files,", done.bytes, "bytes")

        async with aclosing(box.fs.watch("tree")) as watching:
            await anext(watching)  # an empty one: from here on nothing is missed
            await box.fs.mkdir("tree/new")
            changes = await anext(watching)
            print("changed:", [f"{change.kind} {change.path}" for change in changes])


if __name__ == "__main__":
    asyncio.run(main())
