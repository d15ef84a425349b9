"""Files, and the users they belong to."""

from __future__ import annotations

import os
from typing import Any

from vercel import sandbox as api  # type: ignore[import-not-found]

from tests.conformance.py.bench import Bench, scenario, sh


async def file_refusal(call: Any) -> str:
    try:
        await call
    except api.SandboxPathNotFoundError:
        return "missing"
    except api.SandboxError as error:
        return type(error).__name__
    return "succeeded"


@scenario
async def files(bench: Bench) -> Any:
    async with bench.box() as box:
        fs = box.fs
        await fs.write_text("a/hello.txt", "hello é\n", mode=0o600)
        await fs.write_bytes("empty", b"")
        big = os.urandom(5 << 20)
        await fs.write_bytes("big.bin", big)
        await fs.mkdir("x/y/z")
        await fs.write_text("x/y/z/deep.txt", "deep\n")
        await fs.write_text("again.txt", "first\n")
        await fs.write_text("again.txt", "second\n")
        me = (await sh(box, "id -un")).strip()
        return {
            "text": await fs.read_text("a/hello.txt"),
            "empty": await fs.read_text("empty"),
            "mode": (await sh(box, "stat -c %a a/hello.txt")).strip(),
            "owner_is_me": (await sh(box, "stat -c %U a/hello.txt")).strip() == me,
            "big": await fs.read_bytes("big.bin") == big,
            "nested": await fs.read_text("/vercel/sandbox/x/y/z/deep.txt"),
            "overwritten": await fs.read_text("again.txt"),
            "missing": await file_refusal(fs.read_text("none.txt")),
            "directory": await file_refusal(fs.read_text("a")) not in ("missing", "succeeded"),
            "onto_root": await file_refusal(fs.write_text("/vercel/sandbox/a", "x")) != "succeeded",
            "relative": await fs.read_text("hello.txt", cwd="/vercel/sandbox/a"),
        }


@scenario
async def fs_helpers(bench: Bench) -> Any:
    async with bench.box() as box:
        fs = box.fs
        await fs.write_text("h/a.txt", "x")
        await fs.mkdir("h/sub")
        await sh(box, "ln -s a.txt h/l")
        entries = sorted([entry.path.rpartition("/")[2], entry.kind] for entry in await fs.listdir("h"))
        seen = {
            "exists": [await fs.exists("h/a.txt"), await fs.exists("h/none")],
            "is_file": [await fs.is_file("h/a.txt"), await fs.is_file("h/sub")],
            "is_dir": [await fs.is_dir("h/a.txt"), await fs.is_dir("h/sub")],
            "listdir": entries,
            "missing": await file_refusal(fs.read_bytes("h/none")),
            "mkdir_missing_parent": await file_refusal(fs.mkdir("no/such", recursive=False)),
        }
        await fs.remove("h/sub", recursive=True)
        await fs.remove("h/never", missing_ok=True)
        await fs.rename("h/a.txt", "h/b.txt")
        async with fs.batch() as batch:
            bench.at_once(batch.write_text("one", "1"))
            bench.at_once(batch.write_text("two", "2"))
        async with fs.open("stream.bin", "wb", size=300000) as writer:
            for _ in range(3):
                await writer.write(b"x" * 100000)
        async with fs.open("stream.bin", "rb") as reader:
            streamed = len(await reader.read())
        return {
            **seen,
            "removed": not await fs.exists("h/sub"),
            "renamed": await fs.read_text("h/b.txt"),
            "batch": [await fs.read_text("one"), await fs.read_text("two")],
            "streamed": streamed,
        }


@scenario
async def users(bench: Bench) -> Any:
    async with bench.box() as box:
        alice = await box.create_user("alice")
        bob = await box.create_user("bob")
        who = await alice.run_process("whoami", capture_output=True)
        await alice.fs.write_text("secret.txt", "secret\n", mode=0o600)
        peek = await bob.run_process("cat", ["/home/alice/secret.txt"], capture_output=True)
        try:
            await box.create_user("alice")
            duplicate = False
        except api.SandboxUserAlreadyExistsError:
            duplicate = True
        return {
            "who": who.stdout.strip(),
            "home": alice.home_dir,
            "own": await alice.fs.read_text("secret.txt"),
            "isolated": peek.returncode != 0,
            "duplicate": duplicate,
        }
