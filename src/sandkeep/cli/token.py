"""``sandkeep token``: credentials for clients that come over TCP. Works with and without a running server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sandkeep.cli.framework import App, Group, argument, command, option
from sandkeep.cli.output import ago
from sandkeep.cli.values import DURATION
from sandkeep.errors import NotFound
from sandkeep.paths import data_directory
from sandkeep.types import milliseconds

if TYPE_CHECKING:
    from sandkeep.store import Store
    from sandkeep.store.rows import Project, Token

token = Group(
    "token",
    "Make, list and revoke tokens for clients that come over TCP.",
    aliases={"list": "ls"},
)


DEFAULT_TEAM, DEFAULT_PROJECT = "local", "default"
"""Where those act who come without a token, so that by default a token sees what they see."""
_TEAM = option(
    "--team",
    "--scope",
    metavar="TEAM",
    envvar="SANDKEEP_TEAM",
    default=DEFAULT_TEAM,
    show_default=True,
    help="Whose it is, as clients will spell it.",
)


@contextmanager
def _store(app: App) -> Iterator[tuple[Store, str]]:
    from sandkeep.server.auth import now_ms
    from sandkeep.store import Store

    directory = data_directory(app.data_dir)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with Store.open(os.path.join(directory, "store.db"), now_ms=now_ms()) as store:
        yield store, directory


@command(
    "create",
    connection=False,
    examples=[
        ("for the same sandboxes as without one", "sandkeep token create"),
        (
            "for a project of its own, for a month",
            "sandkeep token create --team us --project ci --expires 30d",
        ),
    ],
)
@_TEAM
@option(
    "--project",
    metavar="PROJECT",
    envvar="SANDKEEP_PROJECT",
    default=DEFAULT_PROJECT,
    show_default=True,
    help="In which project it acts, as clients will spell it.",
)
@option("--name", default="", metavar="TEXT", help="What it is for.")
@option("--jwt", is_flag=True, help="A form official clients read their scope from.")
@option("--expires", type=DURATION, help="How long it counts, such as 12h or 30d; for ever if not given.")
def create(app: App, team: str, project: str, name: str, jwt: bool, expires: timedelta | None) -> None:
    """Make a token. Its text is shown this once."""
    from sandkeep.server.auth import create_token, load_key

    with _store(app) as (store, directory):
        text, made = create_token(
            store,
            team=team,
            project=project,
            name=name,
            lifetime_ms=None if expires is None else milliseconds(expires),
            jwt_key=load_key(directory) if jwt else None,
        )
    if app.json:
        app.out.json({"token": text, "id": made.id, "expiresAt": _time(made.expires_ms)})
    else:
        app.out.line(text)


@command("ls", connection=False)
@_TEAM
@option("--project", metavar="PROJECT", help="Only those of this project.")
def ls(app: App, team: str, project: str | None) -> None:
    """List the tokens of a team. Their texts are not kept, so they cannot be shown."""
    with _store(app) as (store, _):
        found = [
            (each, made)
            for each in store.projects.of_team(team)
            if project in (None, each.name)
            for made in store.tokens.of_project(each.id)
        ]
    if app.json:
        app.out.json([_shown(each, made) for each, made in found])
    elif found:
        app.out.table(
            ("ID", "STATE", "PROJECT", "EXPIRES", "LAST USED", "NAME"), [_row(*row) for row in found]
        )
    else:
        app.note(f"team {team} has no tokens; --team lists those of another")


def _row(project: Project, made: Token) -> tuple[str, ...]:
    expires, used = _time(made.expires_ms), _time(made.last_used_ms)
    return (
        made.id,
        _state(made),
        project.name,
        ago(expires) if expires else "never",
        ago(used) if used else "never",
        made.name or "-",
    )


@command("revoke", connection=False)
@argument("token", metavar="TOKEN_ID", help="Its id, as 'sandkeep token ls' shows it.")
@_TEAM
def revoke(app: App, token: str, team: str) -> None:
    """End a token for good."""
    from sandkeep.server.auth import revoke_token

    with _store(app) as (store, _):
        for project in store.projects.of_team(team):
            if any(made.id == token for made in store.tokens.of_project(project.id)):
                ended = revoke_token(store, project.id, token)
                if app.json:
                    app.out.json(_shown(project, ended))
                else:
                    app.out.line(f"revoked {ended.id}")
                return
    raise NotFound(
        f"no token {token} in team {team}",
        kind="token",
        name=token,
        hint=f"'sandkeep token ls --team {team}' shows what there is",
    )


def _state(made: Token) -> str:
    if made.revoked_ms is not None:
        return "revoked"
    if made.expires_ms is not None and made.expires_ms <= time.time() * 1000:
        return "expired"
    return "valid"


def _time(time_ms: int | None) -> datetime | None:
    return None if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC)


def _shown(project: Project, made: Token) -> dict[str, Any]:
    return {
        "id": made.id,
        "name": made.name,
        "team": project.team,
        "project": project.name,
        "state": _state(made),
        "createdAt": _time(made.created_ms),
        "expiresAt": _time(made.expires_ms),
        "lastUsedAt": _time(made.last_used_ms),
    }


for each in (create, ls, revoke):
    token.add_command(each)
