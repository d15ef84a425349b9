"""Prepare once, try many ways: fork a sandbox and let each fork go its own way."""

import asyncio

import sandkeep


async def main() -> None:
    async with sandkeep.create_sandbox(tags={"example": "fork"}) as base:
        await base.fs.write_text("notes", "common ground\n")
        await base.snapshot()

        for idea in ("red", "blue"):
            async with base.fork(tags={"example": "fork", "idea": idea}) as fork:
                await fork.run_process("sh", ["-c", f"echo {idea} >> notes"], check=True)
                print(idea, "has", (await fork.fs.read_text("notes")).split())

        print("the base has", (await base.fs.read_text("notes")).split())
        line = await base.snapshot_tree()
        print("snapshots above it:", len(line) - 1)


if __name__ == "__main__":
    asyncio.run(main())
