"""Running processes, and terminals."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from datetime import timedelta
from typing import Any

from vercel import sandbox as api  # type: ignore[import-not-found]

from tests.conformance.py.bench import Bench, connect, refusal, scenario, sh
from tests.conformance.py.cutting import CuttingProxy
from tests.conformance.supervisors import kill_supervisor
from tests.polling import longer_and_longer


@scenario
async def run(bench: Bench) -> Any:
    async with bench.box() as box:
        done = await box.run_process(
            "sh", ["-c", "echo 'out é 😀'; echo err >&2; exit 3"], capture_output=True
        )
        await box.fs.write_text("dir/hello.py", "print('python ran')\n")
        script = await box.run_process("python", ["dir/hello.py"], capture_output=True)
        return {
            "code": done.returncode,
            "stdout": done.stdout,
            "stderr": done.stderr,
            "relative_python": script.stdout,
        }


@scenario
async def run_nul_and_invalid(bench: Bench) -> Any:
    async with bench.box() as box:
        return {"nul": await sh(box, r"printf 'a\0b\0'"), "invalid": await sh(box, r"printf 'x\377y'")}


@scenario
async def run_large_output(bench: Bench) -> Any:
    async with bench.box() as box:
        text = await sh(box, "i=0; while [ $i -lt 3000 ]; do printf '%099d\\n' $i; i=$((i+1)); done")
        lines = text.splitlines()
        numbers = [int(line) for line in lines]
        return {"length": len(text), "lines": len(lines), "ordered": numbers == list(range(3000))}


@scenario
async def run_background_child(bench: Bench) -> Any:
    async with bench.box() as box:
        started = time.monotonic()
        text = await sh(box, "sleep 120 & echo started")
        return {"stdout": text, "quick": time.monotonic() - started < 60}


@scenario
async def run_detached(bench: Bench) -> Any:
    async with bench.box() as box:
        process = await box.create_process("sh", ["-c", "echo one; sleep 1; echo two; exit 7"])
        running = process.returncode is None
        logs = await process.stdout.read()
        code = await process.wait()
        again = await box.get_process(process.id)
        return {
            "running": running,
            "code": code,
            "logs": logs,
            "again": await again.stdout.read(),
            "by_id": again.returncode,
        }


@scenario
async def missing_executable(bench: Bench) -> Any:
    async with bench.box() as box:
        return await refusal(box.run_process("no-such-program"))


@scenario
async def signals(bench: Bench) -> Any:
    async with bench.box() as box:
        seen = {}
        for name in ("SIGINT", "SIGTERM", "SIGKILL"):
            process = await box.create_process("sleep", ["60"])
            await process.send_signal(name)
            seen[name] = await process.wait()
        return seen


@scenario
async def command_timeout(bench: Bench) -> Any:
    async with bench.box() as box:
        for limit in longer_and_longer(1000):
            done = await box.run_process(
                "sh",
                ["-c", "echo before; sleep 100"],
                kill_after=timedelta(milliseconds=limit),
                capture_output=True,
            )
            if done.stdout:
                break
        return {"code": done.returncode, "partial": done.stdout}


@scenario
async def sudo(bench: Bench) -> Any:
    async with bench.box() as box:
        plain = (await sh(box, "echo $PATH")).strip()
        done = await box.run_process("env", sudo=True, capture_output=True)
        found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        uid = await box.run_process("id", ["-u"], sudo=True, capture_output=True)
        return {
            "uid": uid.stdout.strip(),
            "USER": found["USER"],
            "HOME": found["HOME"],
            "SUDO_USER": bool(found["SUDO_USER"]) and found["SUDO_USER"] != "root",
            "path_kept": found["PATH"] == plain,
            "real": (await sh(box, "sudo id -u")).strip(),
        }


@scenario
async def environment(bench: Bench) -> Any:
    async with bench.box(env={"A": "base", "B": "base"}) as box:
        text = await sh(box, "echo $A $B $C", env={"B": "mine", "C": "2"})
        default, override, extra = text.split()
        return {"default": default, "override": override, "extra": extra}


@scenario
async def interrupted_run(bench: Bench) -> Any:
    """The connection is cut in the middle of the output; the client reads the rest from the log."""
    with CuttingProxy(os.environ["SANDBOX_SERVER"], marker=b"/cmd", after=600) as proxy:
        other = connect(proxy.url, blocking=bench.blocking)
        async with bench.box() as box:
            handle = await other.get_sandbox(name=box.name)
            script = "i=0; while [ $i -lt 200 ]; do echo $i; sleep 0.005; i=$((i+1)); done; exit 5"
            done = await handle.run_process("sh", ["-c", script], capture_output=True)
            return {"stdout": done.stdout, "code": done.returncode, "cut": proxy.cuts > 0}


@scenario
async def session_dies_during_a_run(bench: Bench) -> Any:
    async with bench.box() as box:
        await box.fs.write_text("kept.txt", "kept\n")
        watcher = connect(os.environ["SANDBOX_SERVER"], blocking=True).target.get_sandbox(name=box.name)

        def kill_once_it_runs() -> None:
            while not watcher.fs.exists("ready"):
                time.sleep(0.05)
            kill_supervisor(box.current_session_id)

        killer = threading.Thread(target=kill_once_it_runs)
        killer.start()
        done = await box.run_process("sh", ["-c", "echo before; touch ready; sleep 60"], capture_output=True)
        killer.join()
        text = await box.fs.read_text("kept.txt")
        return {"code": done.returncode, "stdout": done.stdout, "text": text}


@scenario
async def stream_error(bench: Bench) -> Any:
    """The output ends with an error in place of an exit code."""
    async with bench.box() as box:
        try:
            await box.run_process("vanish", capture_output=True)
        except api.SandboxStreamError as failed:
            return failed.code
        raise AssertionError("the run succeeded")


@scenario
async def stdin(bench: Bench) -> Any:
    async with bench.box() as box:
        done = await box.run_process("cat", input="ping\n", capture_output=True)
        process = await box.create_process("cat", stdin=subprocess.PIPE)
        if bench.blocking:
            await process.stdin.write(b"one")
            await process.stdin.write(b"two")
            await process.stdin.close()
        else:
            await process.stdin.send(b"one")
            await process.stdin.send(b"two")
            await process.stdin.aclose()
        piped = await process.stdout.read()
        large = await box.run_process("wc", ["-c"], input=b"x" * 1_000_000, capture_output=True)
        closed = await box.create_process("sleep", ["60"])
        looked_up = await box.get_process(closed.id)
        try:
            await (looked_up.stdin.write if bench.blocking else looked_up.stdin.send)(b"x")
            refused = False
        except api.SandboxStdinError:
            refused = True
        await closed.kill()
        return {
            "input": done.stdout,
            "piped": piped,
            "large": int(large.stdout),
            "refused": refused,
        }


@scenario
async def list_commands(bench: Bench) -> Any:
    async with bench.box() as box:
        for word in ("first", "second", "third"):
            await box.run_process("echo", [word])
        return {"newest_first": [process.args[0] for process in await box.query_processes()]}


@scenario
async def terminal(bench: Bench) -> Any:
    async with bench.box() as box:
        operation = box.open_interactive("/bin/sh", cols=100, rows=30, env={"PS1": "$ "})
        async with operation as tty:
            seen = bytearray()

            async def send(text: str) -> None:
                data = text.encode()
                await (tty.stream.write(data) if bench.blocking else tty.stream.send(data))

            async def until(*markers: str) -> str:
                while not all(marker.encode() in seen for marker in markers):
                    got = await (tty.stream.read(65536) if bench.blocking else tty.stream.receive())
                    assert got, bytes(seen)
                    seen.extend(got)
                return seen.decode(errors="replace")

            async def size(label: str) -> str:
                # The marks are split in the input so that its echo is not taken for the answer.
                await send(f"echo {label}'='$(stty size)'='{label}\n")
                text = await until(f"{label}=", f"={label}")
                return text.rpartition(f"{label}=")[2].partition(f"={label}")[0]

            first = await size("one")
            await tty.resize(120, 40)
            second = await size("two")
            await send("head -c 200000 /dev/zero | tr '\\0' x; echo; echo do''ne\n")
            text = await until("done")
            await send("exit 9\n")
            code = await tty.wait()
        async with box.open_interactive("no-such-program") as tty:
            missing = await tty.wait()
        large = text.count("x") >= 200000
        return {"size": first, "resized": second, "code": code, "large": large, "missing": missing}
