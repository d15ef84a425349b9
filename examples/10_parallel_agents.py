"""Many agents at once, each in a sandbox of its own, sharing one client."""

import asyncio

import sandkeep


async def agent(client: sandkeep.Client, number: int) -> int:
    async with client.create_sandbox(persistent=False) as box:
        script = f"print(sum(range({number} * 1000)))"
        done = await box.run_process("python3", ["-c", script], check=True, capture_output=True)
        return int(done.stdout_text)


async def main() -> None:
    async with sandkeep.Client() as client:
        results = await asyncio.gather(*(agent(client, number) for number in range(1, 9)))
    print("results:", results)


if __name__ == "__main__":
    asyncio.run(main())
