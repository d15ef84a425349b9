"""Output outlives the client that started the process: reconnect by id and continue at the offset."""

import asyncio
import secrets

import sandkeep

WORK = "for i in 1 2 3 4 5 6; do echo step $i; sleep 0.1; done"


async def start(name: str) -> tuple[str, int]:
    """Start something and read the beginning of what it prints. Then forget everything but two numbers."""
    async with sandkeep.Client() as client:
        box = await client.create_sandbox(name)
        process = await box.create_process("sh", ["-c", WORK])
        reading = process.output()
        async for chunk in reading:
            await reading.aclose()
            return process.id, chunk.end
    raise AssertionError("it printed nothing")


async def main() -> None:
    name = f"example-{secrets.token_hex(4)}"
    process_id, offset = await start(name)
    print("left at offset", offset)

    box = await sandkeep.get_sandbox(name)
    process = await box.get_process(process_id)
    async for chunk in process.output(offset=offset):
        if isinstance(chunk, sandkeep.OutputChunk):
            print(chunk.data.decode(), end="")
    print("ended with", await process.wait())

    await box.stop()
    ended = await box.get_process(process_id)
    print("after the session:", len(await ended.stdout.read()), "bytes are still there")
    await box.destroy()


if __name__ == "__main__":
    asyncio.run(main())
