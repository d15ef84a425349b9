"""``sandkeep run``: a command in a fresh sandbox, its output here, its exit status ours."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys

from sandkeep.host.driver import ProcessSpec, SessionRef, SessionSpec
from sandkeep.host.native.driver import NativeDriver
from sandkeep.host.storage import Storage
from sandkeep.paths import data_directory
from sandkeep.supervisor.outputlog import STDERR, Chunk, Gap


def run_command(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="sandkeep run", description="Run a command in a fresh sandbox that is removed afterwards."
    )
    parser.add_argument("--image", default="host", help="image to start from (default: the host's own /usr)")
    parser.add_argument("--data-dir", default=None, help="where sandboxes live (default: SANDKEEP_HOME)")
    parser.add_argument("-e", "--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="kill the command after this long")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND [ARGUMENT...]")
    options = parser.parse_args(args)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("say what to run, after --")
    environment = dict(item.split("=", 1) for item in options.env if "=" in item)
    return asyncio.run(
        _run(data_directory(options.data_dir), options.image, command, environment, options.timeout)
    )


async def _run(
    data_dir: str, image: str, command: list[str], environment: dict[str, str], timeout: float | None
) -> int:
    driver = NativeDriver(data_dir)
    storage = Storage(driver)
    name = f"run-{secrets.token_hex(6)}"
    ref = SessionRef(driver.host, name)
    try:
        rootfs, _ = await storage.rootfs(image, progress=_say if sys.stderr.isatty() else None)
        await driver.create(SessionSpec(session=name, rootfs=rootfs, env=environment, volatile=True))
        try:
            limit = None if timeout is None else round(timeout * 1000)
            spec = ProcessSpec(process="main", argv=tuple(command), kill_after_ms=limit)
            await driver.start_process(ref, spec)
            _pass_on_signals(driver, ref)
            async for item in driver.output(ref, "main"):
                if isinstance(item, Chunk):
                    os.write(2 if item.stream == STDERR else 1, item.data)
                elif isinstance(item, Gap):
                    print(f"sandkeep: {item.length} bytes of output were dropped", file=sys.stderr)
            record = await driver.process(ref, "main")
            return int(record["exit_code"] if record["exit_code"] is not None else 1)
        finally:
            await driver.stop(ref, reason="finished")
            await driver.forget(ref)
            await storage.call("session.remove", session=name)
    finally:
        await storage.close()
        await driver.close()


def _pass_on_signals(driver: NativeDriver, ref: SessionRef) -> None:
    """Ctrl-C and a polite kill are meant for the command."""
    loop = asyncio.get_running_loop()
    pending: set[asyncio.Task[None]] = set()

    def pass_on(number: int) -> None:
        task = loop.create_task(driver.signal(ref, number, "main"), name="signal")
        pending.add(task)
        task.add_done_callback(pending.discard)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, pass_on, number)


def _say(what: str, done: int, total: int) -> None:
    print(f"\rsandkeep: {what} {done}/{total}\033[K", end="" if done < total else "\r\033[K", file=sys.stderr)
