"""What a new sandbox is filled with: a git repository or a tar archive from somewhere else.

Content is fetched on the server's side, because a session may not be allowed to reach it, and unpacked inside
the session as its user: whatever a hostile repository or archive does, it does in the sandbox. Credentials
are used for the fetch and end with it.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from sandkeep.engine.context import Context
from sandkeep.engine.files import Files
from sandkeep.engine.processes import Processes
from sandkeep.errors import InvalidRequest, ProcessError
from sandkeep.store.rows import Session
from sandkeep.types import GitSource, SandboxSpec, TarballSource

_PIECE: Final = 1 << 20
_FETCH_SECONDS: Final = 300


async def fill(
    context: Context, processes: Processes, files: Files, session: Session, spec: SandboxSpec
) -> None:
    """Put the specification's source into the running session."""
    source = spec.source
    if isinstance(source, GitSource):
        await _clone(context, processes, files, session, source, into_cwd=spec.runtime is not None)
    elif isinstance(source, TarballSource):
        await _check_address(source.url, private=context.settings.private_sources)
        await files.extract(session.project, session.id, _download(source.url), cwd=session.cwd)


# --- git -----------------------------------------------------------------------------------------------


async def _clone(
    context: Context,
    processes: Processes,
    files: Files,
    session: Session,
    source: GitSource,
    *,
    into_cwd: bool,
) -> None:
    await _check_address(source.url, private=context.settings.private_sources)
    name = urlsplit(source.url).path.rstrip("/").rpartition("/")[2].removesuffix(".git") or "repository"
    target = session.cwd if into_cwd else os.path.join(session.cwd, name)
    scratch = tempfile.mkdtemp(prefix="sandkeep-git-")
    try:
        await _fetch(source, os.path.join(scratch, "git"))
        archive = _tar(os.path.join(scratch, "git"))
        git_directory = f"{target}/.git"
        await files.extract(session.project, session.id, archive, cwd=git_directory)
        await _inside(
            processes, session, target, ["git", "-C", target, "config", "remote.origin.url", source.url]
        )
        await _inside(processes, session, target, ["git", "-C", target, "reset", "--quiet", "--hard"])
    finally:
        await asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, scratch, True)


async def _fetch(source: GitSource, directory: str) -> None:
    """The repository without a working tree: nothing of its content is interpreted out here."""
    command = ["git", "-c", "core.hooksPath=/dev/null", "clone", "--no-checkout", "--quiet"]
    if source.depth is not None:
        command += ["--depth", str(source.depth)]
    work = f"{directory}.work"
    command += ["--separate-git-dir", directory, "--", _with_credentials(source), work]
    await _git(command, source)
    if source.revision is not None:
        base = ["git", "--git-dir", directory, "--work-tree", work]
        deepen = ["--depth", str(source.depth)] if source.depth is not None else []
        await _git([*base, "fetch", "--quiet", *deepen, _with_credentials(source), source.revision], source)
        await _git([*base, "update-ref", "--no-deref", "HEAD", "FETCH_HEAD"], source)


def _with_credentials(source: GitSource) -> str:
    if not source.username and not source.password:
        return source.url
    parts = urlsplit(source.url)
    who = f"{quote(source.username or '', safe='')}:{quote(source.password or '', safe='')}"
    return urlunsplit(parts._replace(netloc=f"{who}@{parts.netloc.rpartition('@')[2]}"))


async def _git(command: list[str], source: GitSource) -> None:
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": "/nonexistent",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ALLOW_PROTOCOL": "http:https:git:ssh",
        "LC_ALL": "C",
    }
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError:
        raise InvalidRequest(
            "git is not installed on the server", field="source", hint="install git to use git sources"
        ) from None
    try:
        _, errors = await asyncio.wait_for(process.communicate(), _FETCH_SECONDS)
    except (TimeoutError, asyncio.CancelledError):
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        text = errors.decode(errors="replace").strip()
        for secret in (source.password, source.username):
            if secret:
                text = text.replace(secret, "…").replace(quote(secret, safe=""), "…")
        raise InvalidRequest(f"cannot clone {source.url}: {text[-500:]}", field="source.url")


async def _inside(processes: Processes, session: Session, cwd: str, argv: list[str]) -> None:
    started = await processes.start(
        session.project, session.id, command=argv[0], args=argv[1:], timeout_ms=_FETCH_SECONDS * 1000
    )
    ended = await processes.wait(session.project, session.id, started.id)
    if ended.exit_code:
        raise ProcessError(f"{' '.join(argv[:4])} failed inside the sandbox", exit_code=ended.exit_code)


async def _tar(directory: str) -> AsyncIterator[bytes]:
    process = await asyncio.create_subprocess_exec(
        "tar", "-C", directory, "-cf", "-", ".", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    while piece := await process.stdout.read(_PIECE):
        yield piece
    if await process.wait():
        raise ProcessError("packing the repository failed")


# --- archives ------------------------------------------------------------------------------------------


async def _check_address(url: str, *, private: bool) -> None:
    """Refuse what only this machine or its network can reach: a tenant must not fetch through the server."""
    parts = urlsplit(url)
    if private:
        return
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(parts.hostname or "", parts.port or 443, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidRequest(f"cannot resolve {parts.hostname}: {error}", field="source.url") from None
    for *_, address in found:
        if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_global:
            raise InvalidRequest(
                f"{parts.hostname} is not a public address",
                field="source.url",
                hint="the operator can allow private sources",
            )


def _open(url: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    response: http.client.HTTPResponse = urlopen(Request(url, headers=headers or {}), timeout=60)
    return response


async def _download(url: str) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    try:
        response = await loop.run_in_executor(None, _open, url)
        with response:
            while piece := await loop.run_in_executor(None, response.read, _PIECE):
                yield piece
    except (OSError, http.client.HTTPException) as error:
        raise InvalidRequest(f"cannot fetch {url}: {error}", field="source.url") from None
