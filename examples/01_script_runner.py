"""Run a script in a sandbox of its own, with a time limit, and read what it printed."""

import asyncio
from datetime import timedelta

import sandkeep
from sandkeep.errors import ProcessFailed

SCRIPT = "import sys; print('the answer is', int(sys.argv[1]) * 2)"


async def main() -> None:
    async with sandkeep.create_sandbox(execution_time_limit=timedelta(minutes=1)) as box:
        await box.fs.write_text("script.py", SCRIPT)
        done = await box.run_process(
            "python3", ["script.py", "21"], kill_after=timedelta(seconds=30), check=True, capture_output=True
        )
        print(done.stdout_text, end="")

        try:
            await box.run_process("python3", ["script.py", "no number"], check=True)
        except ProcessFailed as error:
            print(f"{error.command} ended with {error.returncode}")
            print(error.stderr.decode().splitlines()[-1])


if __name__ == "__main__":
    asyncio.run(main())
