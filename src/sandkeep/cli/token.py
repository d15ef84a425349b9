"""``sandkeep token``: credentials for clients that come over TCP. Works with and without a running server."""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import UTC, datetime

from sandkeep.errors import InvalidRequest, NotFound
from sandkeep.paths import data_directory
from sandkeep.server.auth import create_token, load_key, now_ms
from sandkeep.store import Store
from sandkeep.store.rows import Project, Token

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}


def token_command(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="sandkeep token", description="Make, list and revoke tokens.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser("create", help="make a token; its text is shown this once")
    create.add_argument("--team", required=True, help="team id, as clients will spell it")
    create.add_argument("--project", required=True, help="project id, as clients will spell it")
    create.add_argument("--name", default="", help="what it is for")
    create.add_argument("--jwt", action="store_true", help="a form official clients read their scope from")
    create.add_argument("--expires", default=None, metavar="TIME", help="lifetime, such as 12h or 30d")
    listing = actions.add_parser("ls", help="list the tokens of a team")
    listing.add_argument("--team", required=True)
    listing.add_argument("--project", default=None)
    revoke = actions.add_parser("revoke", help="end a token for good")
    revoke.add_argument("token", help="its id")
    revoke.add_argument("--team", required=True)
    for action in (create, listing, revoke):
        action.add_argument("--data-dir", default=None, help="where sandboxes live (default: SANDKEEP_HOME)")
        action.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(args)
    directory = data_directory(options.data_dir)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with Store.open(os.path.join(directory, "store.db"), now_ms=now_ms()) as store:
        if options.action == "create":
            return _create(store, directory, options)
        if options.action == "ls":
            return _list(store, options)
        return _revoke(store, options)


def _create(store: Store, directory: str, options: argparse.Namespace) -> int:
    text, token = create_token(
        store,
        team=options.team,
        project=options.project,
        name=options.name,
        lifetime_ms=None if options.expires is None else lifetime_ms(options.expires),
        jwt_key=load_key(directory) if options.jwt else None,
    )
    if options.json:
        print(json.dumps({"token": text, "id": token.id, "expiresAt": token.expires_ms}))
    else:
        print(text)
    return 0


def _list(store: Store, options: argparse.Namespace) -> int:
    found = [
        (project, token)
        for project in store.projects.of_team(options.team)
        if options.project in (None, project.name)
        for token in store.tokens.of_project(project.id)
    ]
    if options.json:
        print(json.dumps([_shown(project, token) for project, token in found]))
        return 0
    for project, token in found:
        expires = _when(token.expires_ms)
        print(f"{token.id}  {_state(token):<8}  {project.name}  {expires}  {token.name}".rstrip())
    return 0


def _revoke(store: Store, options: argparse.Namespace) -> int:
    for project in store.projects.of_team(options.team):
        if any(token.id == options.token for token in store.tokens.of_project(project.id)):
            token = store.tokens.revoke(project.id, options.token, now_ms=now_ms())
            print(json.dumps(_shown(project, token)) if options.json else f"revoked {token.id}")
            return 0
    raise NotFound(f"no token {options.token} in team {options.team}", kind="token", name=options.token)


def lifetime_ms(text: str) -> int:
    """``30d`` and the like, in milliseconds."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isdecimal() or int(number) == 0:
        raise InvalidRequest(
            f"{text!r} is not a lifetime", field="expires", hint="a number and one of s, m, h, d, w, y: 30d"
        )
    return int(number) * _UNITS[unit] * 1000


def _state(token: Token) -> str:
    if token.revoked_ms is not None:
        return "revoked"
    if token.expires_ms is not None and token.expires_ms <= time.time() * 1000:
        return "expired"
    return "valid"


def _when(time_ms: int | None) -> str:
    if time_ms is None:
        return "never expires"
    return f"expires {datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d}"


def _shown(project: Project, token: Token) -> dict[str, object]:
    return {
        "id": token.id,
        "name": token.name,
        "team": project.team,
        "project": project.name,
        "state": _state(token),
        "createdAt": token.created_ms,
        "expiresAt": token.expires_ms,
        "lastUsedAt": token.last_used_ms,
    }
