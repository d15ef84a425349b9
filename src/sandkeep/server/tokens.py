"""Tokens as the API shows them: created, listed and revoked in the store."""

from __future__ import annotations

from msgspec import UNSET

from sandkeep.errors import NotFound
from sandkeep.server.auth import create_token, revoke_token
from sandkeep.store import Store
from sandkeep.store.rows import Project, Token
from sandkeep.wire.tokens import TokenMade, TokenObject


def create(
    store: Store, *, team: str, project: str, name: str, lifetime_ms: int | None, jwt_key: bytes | None
) -> TokenMade:
    text, made = create_token(
        store, team=team, project=project, name=name, lifetime_ms=lifetime_ms, jwt_key=jwt_key
    )
    return TokenMade(text=text, token=_object(team, project, made))


def of_team(store: Store, team: str, project: str | None) -> list[TokenObject]:
    """Return the tokens of one project, or of the whole team."""
    return [
        _shown(each, made)
        for each in store.projects.of_team(team)
        if project in (None, each.name)
        for made in store.tokens.of_project(each.id)
    ]


def revoke(store: Store, team: str, token: str) -> TokenObject:
    for project in store.projects.of_team(team):
        if any(made.id == token for made in store.tokens.of_project(project.id)):
            return _shown(project, revoke_token(store, project.id, token))
    raise NotFound(
        f"no token {token} in team {team}",
        kind="token",
        name=token,
        hint=f"'sandkeep token ls --team {team}' lists the tokens",
    )


def _shown(project: Project, made: Token) -> TokenObject:
    return _object(project.team, project.name, made)


def _object(team: str, project: str, made: Token) -> TokenObject:
    return TokenObject(
        id=made.id,
        name=made.name,
        team=team,
        project=project,
        created_at=made.created_ms,
        expires_at=UNSET if made.expires_ms is None else made.expires_ms,
        last_used_at=UNSET if made.last_used_ms is None else made.last_used_ms,
        revoked_at=UNSET if made.revoked_ms is None else made.revoked_ms,
    )
