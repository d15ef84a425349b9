"""A sandbox outlives its sessions: stop it, come back by name, find everything as it was."""

import asyncio
import secrets

import sandkeep


async def prepare(box: sandkeep.Sandbox) -> None:
    print("created, so prepare it")
    await box.fs.write_text("counter", "0")


async def welcome(box: sandkeep.Sandbox) -> None:
    print("resumed from", "a snapshot" if box.current_session.source_snapshot_id else "nothing")


async def main() -> None:
    name = f"example-{secrets.token_hex(4)}"
    for _ in range(3):
        scope = sandkeep.get_or_create_sandbox(name, on_create=prepare, on_resume=welcome)
        async with scope as box:
            count = int(await box.fs.read_text("counter")) + 1
            await box.fs.write_text("counter", str(count))
            print("visit", count)

    box = await sandkeep.get_sandbox(name)
    print("now it is", box.status.value)
    print("visits, read by resuming on demand:", await box.fs.read_text("counter"))
    print("sessions:", len(await box.sessions().all()))
    await box.destroy()


if __name__ == "__main__":
    asyncio.run(main())
