"""Keep a state to come back to: take a checkpoint, go wrong, roll back."""

import asyncio

import sandkeep


async def main() -> None:
    async with sandkeep.create_sandbox() as box:
        await box.fs.write_text("database", "precious\n")
        safe = await box.checkpoint()
        print(
            f"checkpoint {safe.method.value if safe.method else '?'}; the session goes on: {box.status.value}"
        )

        await box.run_process("sh", ["-c", "echo garbage > database"], check=True)
        print("now:", (await box.fs.read_text("database")).strip())

        await box.rollback(safe)
        print("after the rollback:", (await box.fs.read_text("database")).strip())

        async with sandkeep.create_sandbox(source=sandkeep.SnapshotSource(safe.id)) as other:
            print("in a new sandbox:", (await other.fs.read_text("database")).strip())


if __name__ == "__main__":
    asyncio.run(main())
