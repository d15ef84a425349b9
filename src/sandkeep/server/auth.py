"""Who the caller is, and in which project the request acts.

Over the unix socket the kernel identifies the peer: the server's own user and root may do everything, in any
team and project that a request names. Over TCP a bearer token identifies the caller, and acts in one project
only: a request that names another team or project is refused whether that exists or not, and objects of
another project are not found.

A token is an opaque text or a JWT made by this server, for clients that read their scope from it. Either way
its digest is in the store, so that it can be revoked; a JWT must also be signed with our key.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from sandkeep.engine.keys import write_private
from sandkeep.engine.names import new_id
from sandkeep.errors import AccessDenied, StoreError, Unauthenticated
from sandkeep.server.http import Request
from sandkeep.shared import jwt
from sandkeep.store import Store
from sandkeep.store.rows import Project, Token
from sandkeep.store.tokens import new_token_text

DEFAULT_TEAM: Final = "local"
DEFAULT_PROJECT: Final = "default"
INFERRED_PROJECT: Final = "vercel-sandbox-default-project"
"""Project name that clients send by default; it means the token's own project."""
JWT_LIFETIME_MS: Final = 10 * 365 * 24 * 60 * 60 * 1000
"""Far enough away for clients that try to refresh a token shortly before it expires."""

LOOK_SECONDS: Final = 2.0
"""Interval at which open streams are checked for revoked or expired tokens."""

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
        write_private(path, secrets.token_bytes(32))
        return _read_key(path)


def _read_key(path: str) -> bytes:
    with open(path, "rb") as handle:
        key = handle.read(64)
    if len(key) < 32:
        raise StoreError(f"{path} is not a key", path=path, hint="remove it to have a new one made")
    return key


def create_token(
    store: Store,
    *,
    team: str,
    project: str,
    name: str = "",
    lifetime_ms: int | None = None,
    jwt_key: bytes | None = None,
) -> tuple[str, Token]:
    """Create a token for a project, and the project if it is new; with a key, as a JWT."""
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
        text = jwt.sign_hs256(jwt_key, claims)
    expires = None if lifetime_ms is None else now + lifetime_ms
    with store.transaction():
        made = store.tokens.add(token_id, text, project=row.id, name=name, now_ms=now, expires_ms=expires)
        _record(store, "token.created", made, now)
    return text, made


def revoke_token(store: Store, project: str, token_id: str) -> Token:
    """Revoke a token for good."""
    now = now_ms()
    with store.transaction():
        ended = store.tokens.revoke(project, token_id, now_ms=now)
        if ended.revoked_ms == now:
            _record(store, "token.revoked", ended, now)
    return ended


def _record(store: Store, kind: str, token: Token, now: int) -> None:
    """Record the event here: tokens can be made and revoked without a server, by writing to its directory."""
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
    """An authenticated caller. Without a project: the local user."""

    project: Project | None = None
    token: str | None = None
    uid: int | None = None

    @property
    def actor(self) -> str:
        """Name of the caller in events."""
        return f"user:{self.uid}" if self.token is None else f"token:{self.token}"


@dataclass(frozen=True, slots=True)
class Scope:
    """The project a request acts in, and how its caller spells it."""

    project: str
    shown: str
    team: str


NOWHERE: Final = ""
"""The project of objects that do not exist: nothing is ever found in it."""


class Auth:
    def __init__(self, store: Store, jwt_key: bytes) -> None:
        self._store = store
        self.jwt_key = jwt_key
        self._uids = {0, os.geteuid()}

    def identify(self, request: Request) -> Caller:
        """Return the caller. Raises `Unauthenticated` with the same message for every reason.

        The exact reason goes into the request's facts, for the operator's log.
        """
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
            if text.count(".") != 2 or jwt.verify_hs256(self.jwt_key, text, at_ms=now) is not None:
                found = self._store.tokens.authenticate(text, now_ms=now)
                if found is not None:
                    if (known := (request.scope.get("state") or {}).get("known")) is not None:
                        known()
                    return Caller(project=found[1], token=found[0].id)
        request.facts.update(self._why_refused(scheme, text))
        raise Unauthenticated("a valid token is needed", hint="make one with: sandkeep token create")

    def _why_refused(self, scheme: str, text: str) -> dict[str, str]:
        if not text:
            return {"reason": "no token"}
        if scheme.lower() != "bearer" or len(text) > _LONGEST_TOKEN:
            return {"reason": "no bearer token"}
        token = self._store.tokens.of_text_everywhere(text)
        if token is None:
            return {"reason": "unknown token"}
        if token.revoked_ms is not None:
            state = "revoked token"
        elif token.expires_ms is not None and token.expires_ms <= now_ms():
            state = "expired token"
        else:
            state = "token signed with an earlier key of this server"
        return {"reason": state, "actor": f"token:{token.id}"}

    def accepts(self, token: str) -> bool:
        """Whether the token with this id is still valid."""
        found = self._store.tokens.find(token)
        if found is None or found.revoked_ms is not None:
            return False
        return found.expires_ms is None or found.expires_ms > now_ms()

    @contextmanager
    def while_accepted(self, token: str | None, end: Callable[[], object]) -> Iterator[None]:
        """Call ``end`` if the token becomes invalid while the block runs: open streams do not outlive it.

        The token is polled, because another process may revoke it.
        """
        if token is None:
            yield
            return

        async def watch() -> None:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                if not self.accepts(token):
                    # Repeat until the task ends: a cancellation can be swallowed by an event at the same
                    # time.
                    end()

        watching = asyncio.create_task(watch(), name=f"watch {token}")
        try:
            yield
        finally:
            watching.cancel()

    def scope(
        self, caller: Caller, query: dict[str, str], *, project: str | None = None, make: bool = False
    ) -> Scope:
        """Return the project a request acts in: the one that the query names, or ``project``.

        Ids of sessions and snapshots say nothing about it: in another project they are not found. ``make``:
        the request will create something, so create a local caller's new project too.
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


def _named(query: dict[str, str]) -> tuple[str, str]:
    team = query.get("teamId") or query.get("slug") or ""
    return team, query.get("projectId") or query.get("project") or ""


def _within(project: Project, team: str, named: str) -> Scope:
    if team and team != project.team:
        raise AccessDenied(f"the token is not valid for team {team}", team=team)
    if named and named not in (project.name, INFERRED_PROJECT):
        raise AccessDenied(f"the token is not valid for project {named}", project=named)
    return Scope(project.id, named or project.name, project.team)
