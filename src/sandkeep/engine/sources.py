"""Sources of new sandboxes: a git repository or a tar archive that the caller names by URL.

The server fetches the content, because the session may not be allowed to reach it, and unpacks it inside the
session as its user, so a hostile repository or archive can harm the sandbox only. Credentials are used for
the fetch and not kept. The server's git is confined and limited, see ``engine/fetching.py``.

Unless the operator allows private sources, only public addresses are fetched from. The server decides that
before it connects, on the address it connects to, and again for every redirect.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import os
import time
from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from sandkeep import fetch
from sandkeep.engine.context import Context
from sandkeep.engine.fetching import FETCH_SECONDS, Failed, Fetch, scratch_directory, too_large, too_slow
from sandkeep.engine.names import new_id
from sandkeep.engine.settings import Settings
from sandkeep.errors import InvalidRequest, ProcessError
from sandkeep.host.driver import ProcessSpec
from sandkeep.reach import HINT, Reach, Unreachable
from sandkeep.spec import GitSource, SandboxSpec, TarballSource
from sandkeep.store.rows import Session

_CHUNK: Final = 1 << 20
_MOST_REDIRECTS: Final = 10
_TIMEOUT: Final = 60.0
_PORTS: Final = {"http": 80, "https": 443, "git": 9418, "ssh": 22}


async def fill(context: Context, session: Session, spec: SandboxSpec) -> None:
    """Put the specification's source into a running session, before the caller gets the session."""
    source = spec.source
    if isinstance(source, GitSource):
        await _clone(context, session, source, into_cwd=spec.runtime is not None)
    elif isinstance(source, TarballSource):
        await _extract(
            context, session, _download(source.url, _reach(context), context.settings), session.cwd
        )


async def _extract(context: Context, session: Session, data: AsyncIterator[bytes], target: str) -> None:
    await context.driver.files(context.ref(session)).extract(target, data)


# --- git -----------------------------------------------------------------------------------------------


async def _clone(context: Context, session: Session, source: GitSource, *, into_cwd: bool) -> None:
    private = context.settings.private_sources
    pinned = await _pinned(source.url, _reach(context))
    name = urlsplit(source.url).path.rstrip("/").rpartition("/")[2].removesuffix(".git") or "repository"
    target = session.cwd if into_cwd else os.path.join(session.cwd, name)
    async with scratch_directory(context.data_dir) as scratch:
        await _Git(context, source, pinned, private=private).fetch(scratch)
        await _extract(context, session, _tar(os.path.join(scratch, "git")), f"{target}/.git")
    await _inside(context, session, ["git", "-C", target, "config", "remote.origin.url", _bare(source.url)])
    await _inside(context, session, ["git", "-C", target, "reset", "--quiet", "--hard"])


async def _pinned(url: str, reach: Reach) -> list[tuple[str, str]]:
    """Return configuration that pins git to the addresses that were checked, if the name changes later."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    redirects = [] if reach.private else [("http.followRedirects", "false")]
    try:
        places = await asyncio.get_running_loop().run_in_executor(None, reach.check, host, port)
    except Unreachable:
        raise _unreachable(host) from None
    if reach.proxy is not None:
        return [("http.proxy", reach.proxy), *redirects]
    if all(place.text == host for place in places):
        return redirects  # the URL has an address, not a name
    entry = f"{host}:{port}:{','.join(place.text for place in places)}"
    return [("http.curloptResolve", entry), *redirects]


class _Git:
    """Runs git for one source."""

    def __init__(
        self, context: Context, source: GitSource, options: list[tuple[str, str]], *, private: bool
    ) -> None:
        self._context = context
        self._source = source
        self._options = [("core.hooksPath", "/dev/null"), *options, *_credentials(source)]
        # ssh would use the keys of the server's user, for every caller.
        self._protocols = "http:https:git:ssh" if private else "http:https"

    async def fetch(self, scratch: str) -> None:
        """Fetch the repository without a working tree: git on the host interprets none of its content."""
        source = self._source
        confined = urlsplit(source.url).scheme != "ssh"
        fetch = Fetch(self._context.data_dir, scratch, self._context.settings, confined=confined)
        directory, work = f"{fetch.root}/git", f"{fetch.root}/git.work"
        depth = ["--depth", str(source.depth)] if source.depth is not None else []
        whole = ["--no-checkout", "--quiet", "--separate-git-dir", directory]
        commands = [["clone", *depth, *whole, "--", _address(source), work]]
        if source.revision is not None:
            base = ["--git-dir", directory, "--work-tree", work]
            commands += [
                [*base, "fetch", "--quiet", *depth, _address(source), source.revision],
                [*base, "update-ref", "--no-deref", "HEAD", "FETCH_HEAD"],
            ]
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": "/nonexistent",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_ALLOW_PROTOCOL": self._protocols,
            "LC_ALL": "C",
        }
        try:
            await fetch.run(commands, environment, self._options)
        except Failed as error:
            text = str(error)
            for secret in reversed(_login(source)):
                if secret:
                    text = text.replace(secret, "…").replace(quote(secret, safe=""), "…")
            raise InvalidRequest(
                f"cannot clone {_bare(source.url)}: {text[-500:]}", field="source.url"
            ) from None


def _bare(url: str) -> str:
    """Return the URL without credentials, except an ssh user, which is part of the address."""
    parts = urlsplit(url)
    user = f"{parts.username}@" if parts.username and parts.scheme == "ssh" else ""
    return urlunsplit(parts._replace(netloc=user + parts.netloc.rpartition("@")[2]))


def _login(source: GitSource) -> tuple[str, str]:
    parts = urlsplit(source.url)
    given = source.username or source.password
    name, password = (source.username, source.password) if given else (parts.username, parts.password)
    return (name or "", password or "") if given else (unquote(name or ""), unquote(password or ""))


def _address(source: GitSource) -> str:
    parts = urlsplit(_bare(source.url))
    name, _ = _login(source)
    if parts.scheme == "ssh" and name and not parts.username:
        return urlunsplit(parts._replace(netloc=f"{quote(name, safe='')}@{parts.netloc}"))
    return urlunsplit(parts)


def _credentials(source: GitSource) -> list[tuple[str, str]]:
    """Return configuration that sends credentials to that server only.

    Not as an argument: every user of the machine can read arguments of processes.
    """
    parts = urlsplit(_bare(source.url))
    name, password = _login(source)
    if parts.scheme not in ("http", "https") or not (name or password):
        return []
    encoded = base64.b64encode(f"{name}:{password}".encode()).decode()
    return [(f"http.{parts.scheme}://{parts.netloc}/.extraHeader", f"Authorization: Basic {encoded}")]


async def _inside(context: Context, session: Session, argv: list[str]) -> None:
    """Run a command in the session without listing it among the session's processes."""
    ref = context.ref(session)
    name = new_id("fill", now_ms=context.now_ms())
    process = await context.driver.start_process(
        ref, ProcessSpec(name, tuple(argv), kill_after_ms=FETCH_SECONDS * 1000)
    )
    ended = await process.wait()
    if ended.exit_code != 0:
        raise ProcessError(f"{' '.join(argv[:4])} failed inside the sandbox", exit_code=ended.exit_code)


async def _tar(directory: str) -> AsyncIterator[bytes]:
    process = await asyncio.create_subprocess_exec(
        "tar", "-C", directory, "-cf", "-", ".", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    while chunk := await process.stdout.read(_CHUNK):
        yield chunk
    if await process.wait():
        raise ProcessError("packing the repository failed")


# --- archives ------------------------------------------------------------------------------------------


def _reach(context: Context) -> Reach:
    settings = context.settings
    return Reach(settings.private_sources, context.network.own_ports, settings.proxy)


def _unreachable(host: str | None) -> InvalidRequest:
    """Return the same error for an unknown name, a refused address and a port without a listener."""
    return InvalidRequest(f"{host} cannot be reached", field="source.url", hint=HINT)


def open_url(url: str, reach: Reach) -> fetch.Exchange:
    """Return the response to a GET, redirects followed; ``reach`` checks each address before connecting.

    Raises:
        Unreachable: an address is refused or does not answer.
        ValueError: a redirect leads to another scheme than http and https.
    """
    for _ in range(_MOST_REDIRECTS + 1):
        exchange = fetch.Exchange(fetch.connect(url, reach, timeout=_TIMEOUT), url, {})
        if exchange.redirect is None:
            return exchange
        url = exchange.redirect
        exchange.close()
    raise http.client.HTTPException("too many redirects")


async def _download(url: str, reach: Reach, settings: Settings) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    most, seconds = settings.max_source_bytes, settings.max_pull_ms / 1000
    size, until = 0, time.monotonic() + seconds
    try:
        exchange = await loop.run_in_executor(None, open_url, url, reach)
        with exchange:
            response = exchange.response
            if not 200 <= response.status < 300:
                raise InvalidRequest(
                    f"cannot fetch {url}: the server answers {response.status}", field="source.url"
                )
            # Only bytes that have arrived: a server that sends a byte a minute must not hold a thread.
            while chunk := await loop.run_in_executor(None, response.read1, _CHUNK):
                size += len(chunk)
                if size > most:
                    raise too_large(most)
                if time.monotonic() > until:
                    raise too_slow(seconds)
                yield chunk
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
    except Unreachable as error:
        raise _unreachable(error.host) from None
    except (*fetch.NETWORK_ERRORS, ValueError):
        raise InvalidRequest(f"cannot fetch {url}: the connection broke off", field="source.url") from None
