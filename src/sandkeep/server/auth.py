"""Who asks, and in which project.

Over the unix socket the kernel says who the peer is: the server's own user and root may do everything, in
whatever team and project a request names. Over TCP a bearer token does, and it acts in one project only: a
request that names another team or project is refused whether that exists or not, and what belongs to another
project is as absent as what never was.

A token is an opaque text or a JWT of our own making, for clients that read their scope from it. Either way
its digest is in the store, so it can be revoked; a JWT must be signed with our key besides.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from sandkeep.engine.names import new_id
from sandkeep.errors import AccessDenied, StoreError, Unauthenticated
from sandkeep.server.http import Request
from sandkeep.store import Store
from sandkeep.store.rows import Project, Session, Snapshot, Token
from sandkeep.store.tokens import new_token_text

DEFAULT_TEAM: Final = "local"
DEFAULT_PROJECT: Final = "default"
INFERRED_PROJECT: Final = "vercel-sandbox-default-project"
"""What clients call their project when nobody told them one: the token's own."""
JWT_LIFETIME_MS: Final = 10 * 365 * 24 * 60 * 60 * 1000
"""Far enough for clients that try to refresh a token about to expire."""

LOOK_SECONDS: Final = 2.0
"""How soon what a token keeps open is cut once the token is worth nothing."""

_HEADER: Final = {"alg": "HS256", "typ": "JWT"}
_LONGEST_TOKEN: Final = 4096


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# --- tokens --------------------------------------------------------------------------------------------


def load_key(data_dir: str) -> bytes:
    """The key JWTs are signed with; made when there is none."""
    path = os.path.join(data_dir, "jwt.key")
    try:
        return _read_key(path)
    except FileNotFoundError:
        pass
    draft = f"{path}.{os.getpid()}.{secrets.token_hex(4)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(secrets.token_bytes(32))
            out.flush()
            os.fsync(out.fileno())
        os.link(draft, path)
    except FileExistsError:
        pass  # another process was first; its key counts
    finally:
        os.unlink(draft)
    return _read_key(path)


def _read_key(path: str) -> bytes:
    with open(path, "rb") as handle:
        key = handle.read(64)
    if len(key) < 32:
        raise StoreError(f"{path} is not a key", path=path, hint="remove it to have a new one made")
    return key


def sign(key: bytes, claims: dict[str, Any]) -> str:
    """A JWT with these claims."""
    signed = f"{_encoded(_HEADER)}.{_encoded(claims)}"
    return f"{signed}.{_base64(_signature(key, signed))}"


def verify(key: bytes, text: str, *, at_ms: int) -> dict[str, Any] | None:
    """The claims of a JWT that we signed and that has not expired."""
    signed, _, signature = text.rpartition(".")
    if not hmac.compare_digest(_base64(_signature(key, signed)).encode(), signature.encode()):
        return None
    payload = signed.partition(".")[2]
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except ValueError:
        return None
    if not isinstance(claims, dict) or not isinstance(claims.get("exp"), int):
        return None
    return claims if claims["exp"] * 1000 > at_ms else None


def _signature(key: bytes, signed: str) -> bytes:
    return hmac.digest(key, signed.encode(), hashlib.sha256)


def _encoded(value: dict[str, Any]) -> str:
    return _base64(json.dumps(value, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def create_token(
    store: Store,
    *,
    team: str,
    project: str,
    name: str = "",
    lifetime_ms: int | None = None,
    jwt_key: bytes | None = None,
) -> tuple[str, Token]:
    """A new token for a project, which is made when it is new; with a key, in the signed form."""
    now = now_ms()
    row = store.projects.ensure(new_id("prj", now_ms=now), team=team, name=project, now_ms=now)
    token_id = new_id("tok", now_ms=now)
    if jwt_key is None:
        text = new_token_text()
    else:
        lifetime_ms = JWT_LIFETIME_MS if lifetime_ms is None else lifetime_ms
        claims = {
            "jti": token_id,
            "owner_id": team,
            "owner": team,
            "project_id": project,
            "project": project,
            "iat": now // 1000,
            "exp": (now + lifetime_ms) // 1000,
        }
        text = sign(jwt_key, claims)
    expires = None if lifetime_ms is None else now + lifetime_ms
    with store.transaction():
        made = store.tokens.add(token_id, text, project=row.id, name=name, now_ms=now, expires_ms=expires)
        _record(store, "token.created", made, now)
    return text, made


def revoke_token(store: Store, project: str, token_id: str) -> Token:
    """End a token for good."""
    now = now_ms()
    with store.transaction():
        ended = store.tokens.revoke(project, token_id, now_ms=now)
        if ended.revoked_ms == now:
            _record(store, "token.revoked", ended, now)
    return ended


def _record(store: Store, kind: str, token: Token, now: int) -> None:
    """Tokens are made and ended by whoever can write to the data directory, with or without a server."""
    store.events.add(
        new_id("evt", now_ms=now),
        kind,
        time_ms=now,
        project=token.project,
        data={"token": token.id, "name": token.name},
        actor=f"user:{os.geteuid()}",
    )


# --- requests ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody we know. Without a project: the local user."""

    project: Project | None = None
    token: str | None = None
    uid: int | None = None

    @property
    def actor(self) -> str:
        """What events call it."""
        return f"user:{self.uid}" if self.token is None else f"token:{self.token}"


@dataclass(frozen=True, slots=True)
class Scope:
    """The project a request acts in, and how its caller spells it."""

    project: str
    shown: str
    team: str


NOWHERE: Final = ""
"""The project of what does not exist: nothing is ever found in it."""


class Auth:
    def __init__(self, store: Store, jwt_key: bytes) -> None:
        self._store = store
        self._key = jwt_key
        self._uids = {0, os.geteuid()}

    def identify(self, request: Request) -> Caller:
        """Raises `Unauthenticated`, with the same words whatever is wrong with the credentials."""
        peer = (request.scope.get("state") or {}).get("peer")
        if peer is not None:
            if peer.uid in self._uids:
                return Caller(uid=peer.uid)
            raise AccessDenied("this socket belongs to another user")
        header = request.header(b"authorization") or b""
        scheme, _, text = header.decode("latin-1").partition(" ")
        text = text.strip()
        if scheme.lower() == "bearer" and text and len(text) <= _LONGEST_TOKEN:
            now = now_ms()
            if text.count(".") != 2 or verify(self._key, text, at_ms=now) is not None:
                found = self._store.tokens.authenticate(text, now_ms=now)
                if found is not None:
                    return Caller(project=found[1], token=found[0].id)
        raise Unauthenticated("a valid token is needed", hint="make one with: sandkeep token create")

    def accepts(self, token: str) -> bool:
        """Whether a token that spoke for somebody earlier, by its id, still does."""
        found = self._store.tokens.find(token)
        if found is None or found.revoked_ms is not None:
            return False
        return found.expires_ms is None or found.expires_ms > now_ms()

    @contextmanager
    def while_accepted(self, token: str | None, end: Callable[[], object]) -> Iterator[None]:
        """Call ``end`` should the token lose its power meanwhile: what is open does not outlive it.

        Looked at every now and then, because another process may have revoked it.
        """
        if token is None:
            yield
            return

        async def watch() -> None:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                if not self.accepts(token):
                    end()  # until it has: a cancellation may be lost to what arrives at the same moment

        watching = asyncio.create_task(watch(), name=f"watch {token}")
        try:
            yield
        finally:
            watching.cancel()

    def scope(
        self, caller: Caller, query: dict[str, str], *, project: str | None = None, make: bool = False
    ) -> Scope:
        """Where a request acts that names its project, in the query or as given.

        ``make``: it will create something, so a local caller's new project is made as well.
        """
        team, named = _named(query)
        named = project or named
        if caller.project is not None:
            return _within(caller.project, team, named)
        team, named = team or DEFAULT_TEAM, named or DEFAULT_PROJECT
        if make:
            now = now_ms()
            row = self._store.projects.ensure(new_id("prj", now_ms=now), team=team, name=named, now_ms=now)
            return Scope(row.id, named, team)
        found = self._store.projects.find(team=team, name=named)
        return Scope(NOWHERE if found is None else found.id, named, team)

    def session_scope(self, caller: Caller, query: dict[str, str], session: str) -> Scope:
        """Where a request acts that names only a session."""
        return self._owner(caller, query, lambda: self._store.sessions.find(session))

    def snapshot_scope(self, caller: Caller, query: dict[str, str], snapshot: str) -> Scope:
        return self._owner(caller, query, lambda: self._store.snapshots.find(snapshot))

    def _owner(self, caller: Caller, query: dict[str, str], find: Any) -> Scope:
        team, named = _named(query)
        if caller.project is not None:
            return _within(caller.project, team, named)
        row: Session | Snapshot | None = find()
        if row is None:
            return Scope(NOWHERE, named or DEFAULT_PROJECT, team or DEFAULT_TEAM)
        project = self._store.projects.get(row.project)
        if (team and team != project.team) or (named and named != project.name):
            return Scope(NOWHERE, named or DEFAULT_PROJECT, team or DEFAULT_TEAM)
        return Scope(project.id, project.name, project.team)


def _named(query: dict[str, str]) -> tuple[str, str]:
    team = query.get("teamId") or query.get("slug") or ""
    return team, query.get("projectId") or query.get("project") or ""


def _within(project: Project, team: str, named: str) -> Scope:
    if team and team != project.team:
        raise AccessDenied("the token does not act for this team", team=team)
    if named and named not in (project.name, INFERRED_PROJECT):
        raise AccessDenied("the token does not act in this project", project=named)
    return Scope(project.id, named or project.name, project.team)
