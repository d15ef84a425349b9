"""``sandkeep token``: tokens for clients that connect over TCP.

The server creates, lists and revokes tokens, for the local user only. If no server runs, one is started for
the request and ends after it, unless there are running sandboxes to look after.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import quote, urlencode

from sandkeep.checks import milliseconds
from sandkeep.cli.app import App
from sandkeep.cli.framework import Group, argument, command, option, store_common
from sandkeep.cli.output import ago
from sandkeep.cli.values import DURATION
from sandkeep.errors import AccessDenied, ServerUnreachable, from_json
from sandkeep.paths import data_directory

token = Group(
    "token",
    "Create, list and revoke tokens for clients that connect over TCP.",
    aliases={"list": "ls"},
)

DEFAULT_TEAM, DEFAULT_PROJECT = "local", "default"
"""Where requests without a token work, so that by default a token sees the same sandboxes."""
_PATH: Final = "/v1/server/tokens"
_TEAM = option(
    "--team",
    "--scope",
    metavar="TEAM",
    expose_value=False,
    callback=store_common,
    help=f"Team that the token belongs to [env: SANDKEEP_TEAM] [default: {DEFAULT_TEAM}]",
)


def _request(app: App, method: str, path: str, **query: object) -> dict[str, Any]:
    """Send a request to the local server and return its response."""
    from sandkeep.embedded import ask, ensure_server, retire

    directory = _directory(app)
    given = {"team": app.team or DEFAULT_TEAM, **query}
    target = f"{path}?{urlencode({name: value for name, value in given.items() if value not in (None, '')})}"
    answer, started = ask(directory, method, target), False
    if answer is None:
        started = ensure_server(directory).started
        answer = ask(directory, method, target)
    if started:
        # The next command may be 'sandkeep serve', which needs the directory to itself.
        retire(directory)
    if answer is None:
        raise ServerUnreachable(f"the server of {directory} does not answer")
    status, body = answer
    if status != 200:
        error = body["error"]
        raise from_json({**error, "code": error.get("kind", error["code"])})
    return body


def _directory(app: App) -> str:
    """Return the data directory of the local server that the options name."""
    if app.url is None:
        return data_directory(app.data_dir)
    if app.url.startswith("unix://"):
        return os.path.dirname(app.url.removeprefix("unix://"))
    raise AccessDenied(
        f"tokens are created, listed and revoked on the machine of the server, which is {app.url}",
        hint="run this there; for a server of this machine give --data-dir, or unset SANDKEEP_URL",
    )


@command(
    "create",
    connection=False,
    examples=[
        ("for the same sandboxes as without a token", "sandkeep token create"),
        (
            "for a project of its own, for 30 days",
            "sandkeep token create --team us --project ci --expires 30d",
        ),
    ],
)
@_TEAM
@option(
    "--project",
    metavar="PROJECT",
    expose_value=False,
    callback=store_common,
    help=f"Project that the token works in [env: SANDKEEP_PROJECT] [default: {DEFAULT_PROJECT}]",
)
@option("--name", default="", metavar="TEXT", help="A note on what the token is for.")
@option("--jwt", is_flag=True, help="Create a JWT, from which official clients read team and project.")
@option(
    "--expires", type=DURATION, help="How long the token is valid, such as 12h or 30d [default: for ever]"
)
def create(app: App, name: str, jwt: bool, expires: timedelta | None) -> None:
    """Create a token. Its text is shown only this once."""
    made = _request(
        app,
        "POST",
        _PATH,
        project=app.project or DEFAULT_PROJECT,
        name=name,
        lifetimeMs=None if expires is None else milliseconds(expires),
        jwt="true" if jwt else None,
    )
    text, shown = made["text"], made["token"]
    if app.json:
        app.out.json({"token": text, "id": shown["id"], "expiresAt": _time(shown, "expiresAt")})
    else:
        app.out.line(text)


@command("ls", connection=False)
@_TEAM
@option("--project", metavar="PROJECT", help="Only tokens of this project.")
def ls(app: App, project: str | None) -> None:
    """List the tokens of a team, without their texts, which the server does not keep."""
    found = _request(app, "GET", _PATH, project=project)["tokens"]
    if app.json:
        app.out.json([_shown(each) for each in found])
    elif found:
        app.out.table(
            ("ID", "STATE", "PROJECT", "EXPIRES", "LAST USED", "NAME"), [_row(each) for each in found]
        )
    else:
        app.note(f"team {app.team or DEFAULT_TEAM} has no tokens; --team lists those of another team")


def _row(token: dict[str, Any]) -> tuple[str, ...]:
    expires, used = _time(token, "expiresAt"), _time(token, "lastUsedAt")
    return (
        token["id"],
        _state(token),
        token["project"],
        ago(expires) if expires else "never",
        ago(used) if used else "never",
        token["name"] or "-",
    )


@command("revoke", connection=False)
@argument("token_id", metavar="TOKEN_ID", help="The id of the token, as 'sandkeep token ls' shows it.")
@_TEAM
def revoke(app: App, token_id: str) -> None:
    """Revoke a token for good."""
    revoked = _request(app, "DELETE", f"{_PATH}/{quote(token_id, safe='')}")["token"]
    if app.json:
        app.out.json(_shown(revoked))
    else:
        app.out.line(f"revoked {revoked['id']}")


def _state(token: dict[str, Any]) -> str:
    if _time(token, "revokedAt") is not None:
        return "revoked"
    expires = _time(token, "expiresAt")
    return "expired" if expires is not None and expires <= datetime.now(UTC) else "valid"


def _time(token: dict[str, Any], field: str) -> datetime | None:
    """Return a time of a token; ``None`` if the field is not set."""
    return datetime.fromtimestamp(token[field] / 1000, UTC) if field in token else None


def _shown(token: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": token["id"],
        "name": token["name"],
        "team": token["team"],
        "project": token["project"],
        "state": _state(token),
        "createdAt": _time(token, "createdAt"),
        "expiresAt": _time(token, "expiresAt"),
        "lastUsedAt": _time(token, "lastUsedAt"),
    }


for each in (create, ls, revoke):
    token.add_command(each)
