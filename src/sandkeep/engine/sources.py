"""What a new sandbox is filled with: a git repository or a tar archive from somewhere else.

Content is fetched on the server's side, because a session may not be allowed to reach it, and unpacked inside
the session as its user: whatever a hostile repository or archive does, it does in the sandbox. Credentials
are used for the fetch and end with it.

Unless the operator allows private sources, only public addresses are fetched from. That is decided on the
address a connection is made to, not on a name that may mean another one a moment later, and for every
redirection again.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)

from sandkeep.engine.context import Context
from sandkeep.engine.names import new_id
from sandkeep.errors import InvalidRequest, ProcessError
from sandkeep.host.driver import ProcessSpec
from sandkeep.net import policy
from sandkeep.store.rows import Session
from sandkeep.types import GitSource, SandboxSpec, TarballSource

_PIECE: Final = 1 << 20
_FETCH_SECONDS: Final = 300


async def fill(context: Context, session: Session, spec: SandboxSpec) -> None:
    """Put the specification's source into a session that runs and that nobody has been shown yet."""
    source = spec.source
    if isinstance(source, GitSource):
        await _clone(context, session, source, into_cwd=spec.runtime is not None)
    elif isinstance(source, TarballSource):
        check = _anything if context.settings.private_sources else is_public
        await _extract(context, session, _download(source.url, check), session.cwd)


async def _extract(context: Context, session: Session, data: AsyncIterator[bytes], target: str) -> None:
    await context.driver.files(context.ref(session), "extract", data=data, path=target)


# --- git -----------------------------------------------------------------------------------------------


async def _clone(context: Context, session: Session, source: GitSource, *, into_cwd: bool) -> None:
    private = context.settings.private_sources
    pinned = [] if private else await _pinned(source.url)
    name = urlsplit(source.url).path.rstrip("/").rpartition("/")[2].removesuffix(".git") or "repository"
    target = session.cwd if into_cwd else os.path.join(session.cwd, name)
    scratch = tempfile.mkdtemp(prefix="sandkeep-git-")
    try:
        await _fetch(_Git(source, pinned, private=private), os.path.join(scratch, "git"))
        await _extract(context, session, _tar(os.path.join(scratch, "git")), f"{target}/.git")
        await _inside(context, session, ["git", "-C", target, "config", "remote.origin.url", source.url])
        await _inside(context, session, ["git", "-C", target, "reset", "--quiet", "--hard"])
    finally:
        await asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, scratch, True)


async def _pinned(url: str) -> list[str]:
    """Options that hold git to addresses that were found to be public, whatever the name means later."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80}.get(parts.scheme, 443)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(parts.hostname or "", port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidRequest(f"cannot resolve {parts.hostname}: {error}", field="source.url") from None
    addresses = [str(address[0]) for *_, address in found]
    if not all(is_public(address) for address in addresses):
        raise _not_public(parts.hostname)
    entry = f"{parts.hostname}:{port}:{','.join(addresses)}"
    return ["-c", f"http.curloptResolve={entry}", "-c", "http.followRedirects=false"]


class _Git:
    """How git is run for one source."""

    def __init__(self, source: GitSource, options: list[str], *, private: bool) -> None:
        self.source = source
        self._options = options
        # ssh would use the keys of whoever runs the server, for whoever asks.
        self._protocols = "http:https:git:ssh" if private else "http:https"

    async def run(self, *arguments: str) -> None:
        command = ["git", "-c", "core.hooksPath=/dev/null", *self._options, *arguments]
        await _git(command, self.source, self._protocols)


async def _fetch(git: _Git, directory: str) -> None:
    """The repository without a working tree: nothing of its content is interpreted out here."""
    source = git.source
    depth = ["--depth", str(source.depth)] if source.depth is not None else []
    address, work = _with_credentials(source), f"{directory}.work"
    whole = ["--no-checkout", "--quiet", "--separate-git-dir", directory]
    await git.run("clone", *depth, *whole, "--", address, work)
    if source.revision is not None:
        base = ["--git-dir", directory, "--work-tree", work]
        await git.run(*base, "fetch", "--quiet", *depth, address, source.revision)
        await git.run(*base, "update-ref", "--no-deref", "HEAD", "FETCH_HEAD")


def _with_credentials(source: GitSource) -> str:
    if not source.username and not source.password:
        return source.url
    parts = urlsplit(source.url)
    who = f"{quote(source.username or '', safe='')}:{quote(source.password or '', safe='')}"
    return urlunsplit(parts._replace(netloc=f"{who}@{parts.netloc.rpartition('@')[2]}"))


async def _git(command: list[str], source: GitSource, protocols: str) -> None:
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": "/nonexistent",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ALLOW_PROTOCOL": protocols,
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


async def _inside(context: Context, session: Session, argv: list[str]) -> None:
    """Run something in the session that is not one of its owner's processes."""
    ref = context.ref(session)
    name = new_id("fill", now_ms=context.now_ms())
    await context.driver.start_process(
        ref, ProcessSpec(name, tuple(argv), kill_after_ms=_FETCH_SECONDS * 1000)
    )
    ended = await context.driver.wait_process(ref, name)
    if ended["exit_code"] != 0:
        raise ProcessError(f"{' '.join(argv[:4])} failed inside the sandbox", exit_code=ended["exit_code"])


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


def is_public(address: str) -> bool:
    """Whether it is none that sandboxes are kept from: the server is no way around that."""
    return policy.special_kind(ipaddress.ip_address(address.partition("%")[0])) is None


def _anything(address: str) -> bool:
    del address
    return True


def _not_public(host: str | None) -> InvalidRequest:
    return InvalidRequest(
        f"{host} is not a public address", field="source.url", hint="the operator can allow private sources"
    )


class _Refused(OSError):
    """A connection to an address that is not to be connected to."""


def _guarded(kind: type[Any], check: Callable[[str], bool]) -> Any:
    """A connection class that looks at whom it has reached before it says anything."""

    class Guarded(kind):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._create_connection = self._connect_checked

        def _connect_checked(self, address: tuple[str, int], *arguments: Any) -> socket.socket:
            sock = socket.create_connection(address, *arguments)
            if not check(str(sock.getpeername()[0])):
                sock.close()
                raise _Refused(f"{address[0]} is not a public address")
            return sock

    return Guarded


class _Plain(HTTPHandler):
    def __init__(self, check: Callable[[str], bool]) -> None:
        super().__init__()
        self._kind = _guarded(http.client.HTTPConnection, check)

    def http_open(self, request: Request) -> http.client.HTTPResponse:
        return self.do_open(self._kind, request)


class _Secure(HTTPSHandler):
    def __init__(self, check: Callable[[str], bool]) -> None:
        super().__init__()
        self._kind = _guarded(http.client.HTTPSConnection, check)

    def https_open(self, request: Request) -> http.client.HTTPResponse:
        return self.do_open(self._kind, request)


def open_url(url: str, check: Callable[[str], bool]) -> http.client.HTTPResponse:
    """A response, redirections followed; ``check`` decides about each address that is connected to."""
    opener = OpenerDirector()
    # No more than these: the usual set would follow a redirection to other schemes, past the check.
    for handler in (
        ProxyHandler(),
        _Plain(check),
        _Secure(check),
        HTTPRedirectHandler(),
        HTTPDefaultErrorHandler(),
        HTTPErrorProcessor(),
        UnknownHandler(),
    ):
        opener.add_handler(handler)
    response: http.client.HTTPResponse = opener.open(Request(url), timeout=60)
    return response


async def _download(url: str, check: Callable[[str], bool]) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    try:
        response = await loop.run_in_executor(None, open_url, url, check)
        with response:
            while piece := await loop.run_in_executor(None, response.read, _PIECE):
                yield piece
    except (OSError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", None), _Refused):
            raise _not_public(urlsplit(url).hostname) from None
        raise InvalidRequest(f"cannot fetch {url}: {error}", field="source.url") from None
