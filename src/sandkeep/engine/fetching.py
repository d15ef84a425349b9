"""Fetch a git repository with a confined git (``net/git.py``), limited in size and time.

The repository is written below ``sources`` in the data directory, whose size is polled: git writes many
files, and the kernel limits only the size of each.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from sandkeep.engine.settings import Settings
from sandkeep.errors import HostCannot, InvalidRequest, LimitReached
from sandkeep.host.images.allowance import Allowance, Spending
from sandkeep.net import confine
from sandkeep.net import git as git_program

FETCH_SECONDS: Final = 300
_CHECK_SECONDS: Final = 0.25
_BLOCK: Final = 4096
"""The least bytes that a file or directory counts as."""
_CONFIGURATION: Final = (
    # Limits of what git maps and keeps in memory, and of its threads.
    ("core.packedGitLimit", "512m"),
    ("core.packedGitWindowSize", "32m"),
    ("core.bigFileThreshold", "64m"),
    ("pack.threads", "2"),
    ("gc.auto", "0"),
)
_TOO_LARGE: Final = ("File too large", f"died of signal {signal.SIGXFSZ.value}")
_NO_MEMORY: Final = "ut of memory"


def too_large(most: int) -> LimitReached:
    return LimitReached(
        f"the source has more than {most} bytes",
        limit="max_source_bytes",
        value=most,
        hint="a smaller depth fetches less of a repository; the operator can change max_source_bytes",
    )


def too_slow(seconds: float) -> LimitReached:
    return LimitReached(
        f"fetching the source took more than {seconds:g} seconds",
        limit="source seconds",
        value=seconds,
        hint="a smaller depth fetches less of a repository",
    )


class Failed(Exception):
    """Git failed; the message is its error output."""


@asynccontextmanager
async def scratch_directory(data_dir: str) -> AsyncIterator[str]:
    """Yield a scratch directory below the data directory, locked while it is used; see ``sweep``."""
    above = _above(data_dir)
    os.makedirs(above, mode=0o700, exist_ok=True)
    path = tempfile.mkdtemp(dir=above)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        await asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, path, True)
        os.close(lock)


def sweep(data_dir: str) -> None:
    """Remove scratch directories of servers that were killed."""
    above = _above(data_dir)
    for name in os.listdir(above) if os.path.isdir(above) else ():
        with suppress(OSError):
            lock = os.open(f"{above}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(f"{above}/{name}", ignore_errors=True)
            finally:
                os.close(lock)


def _above(data_dir: str) -> str:
    return f"{data_dir}/sources"


class Fetch:
    """Runs git in a scratch directory. Paths of its arguments begin with ``root``."""

    def __init__(self, data_dir: str, scratch: str, settings: Settings, *, confined: bool) -> None:
        self._data_dir = data_dir
        self._scratch = scratch
        self._most = settings.max_source_bytes
        self._confined = confined
        self._disk = Spending(Allowance(free_percent=settings.min_free_percent), scratch)
        self.root = confine.SCRATCH if confined else scratch

    async def run(
        self, commands: Sequence[Sequence[str]], environment: dict[str, str], options: list[tuple[str, str]]
    ) -> None:
        """Run each command if the one before succeeded.

        Raises ``Failed`` with git's message, ``LimitReached`` or ``NoSpace``, once all processes have ended.
        """
        program = shutil.which("git", path=environment["PATH"])
        if program is None:
            raise InvalidRequest(
                "git is not installed on the server", field="source", hint="install git to use git sources"
            )
        request = {
            "commands": commands,
            "scratch": self._scratch,
            "git": os.path.realpath(program),
            "data": os.path.realpath(self._data_dir),
            "bytes": self._most,
            "confined": self._confined,
        }
        script = os.path.join(os.path.dirname(git_program.__file__), "start_git.py")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", script, ":".join(sys.path)),
            env=environment | _configuration([*_CONFIGURATION, *options]) | {"TMPDIR": self.root},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        talking = asyncio.create_task(process.communicate(json.dumps(request).encode()), name="git")
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                while not (await asyncio.wait((talking,), timeout=_CHECK_SECONDS))[0]:
                    await self._check_size()
            await self._check_size()
        except TimeoutError:
            raise too_slow(FETCH_SECONDS) from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            # Until its error output ends, which is when the last process that could write to it has ended.
            await asyncio.shield(talking)
        self._judge(process.returncode or 0, talking.result()[1].decode(errors="replace").strip())

    async def _check_size(self) -> None:
        size = await asyncio.get_running_loop().run_in_executor(None, _size, self._scratch, self._most)
        if size > self._most:
            raise too_large(self._most)
        self._disk.check_disk(0)

    def _judge(self, status: int, text: str) -> None:
        if status == 0:
            return
        if status == git_program.UNCONFINED:
            raise HostCannot(
                f"git cannot be run confined: {text}", part="git", why=text, hint="run 'sandkeep doctor'"
            )
        if status == 128 + signal.SIGXFSZ or any(words in text for words in _TOO_LARGE):
            raise too_large(self._most)
        if _NO_MEMORY in text:
            most = git_program.MOST_MEMORY
            raise LimitReached(
                f"git needs more than {most} bytes of memory for this repository",
                limit="source memory",
                value=most,
                hint="a smaller depth fetches less of a repository",
            )
        raise Failed(text)


def _configuration(options: list[tuple[str, str]]) -> dict[str, str]:
    found = {"GIT_CONFIG_COUNT": str(len(options))}
    for number, (key, value) in enumerate(options):
        found |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return found


def _size(directory: str, most: int) -> int:
    """Count bytes below a directory, up to ``most``; files that vanish while counting do not count."""
    total, pending = 0, [directory]
    while pending and total <= most:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += max(entry.stat(follow_symlinks=False).st_size, _BLOCK)
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
    return total
