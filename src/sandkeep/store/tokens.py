"""Tokens: credentials that act in a project.

The text of a token is shown once, when it is created; the row keeps its SHA-256. A digest without salt or
stretching is sufficient because the text has 256 random bits (or is a signed document containing as many): it
cannot be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from sandkeep.errors import NotFound
from sandkeep.store.database import Database
from sandkeep.store.rows import Project, Token
from sandkeep.store.tables import RowTable

_TABLE = RowTable("tokens", Token)
_USE_GRAIN_MS = 60_000


def new_token_text() -> str:
    return "sk_" + secrets.token_urlsafe(32)


def digest_of(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


class Tokens:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(
        self, token_id: str, text: str, *, project: str, name: str, now_ms: int, expires_ms: int | None = None
    ) -> Token:
        """Accept ``text`` (from `new_token_text`, or a signed form made elsewhere) as a credential."""
        row = Token(
            id=token_id,
            digest=digest_of(text),
            project=project,
            name=name,
            created_ms=now_ms,
            expires_ms=expires_ms,
        )
        _TABLE.insert(self._db, row)
        return row

    def authenticate(self, text: str, *, now_ms: int) -> tuple[Token, Project] | None:
        """Return the token and its project, or ``None``: unknown, expired and revoked look alike.

        The index sees only a digest, whose prefix an attacker cannot choose, so the duration of the search
        reveals nothing about stored tokens; the final comparison takes constant time.
        """
        token = self.of_text_everywhere(text)
        if token is None:
            return None
        if token.revoked_ms is not None or (token.expires_ms is not None and token.expires_ms <= now_ms):
            return None
        found = self._db.one(
            "SELECT id, team, name, created_ms FROM projects WHERE id = $1",
            token.project,
        )
        if found is None:
            return None
        if token.last_used_ms is None or now_ms - token.last_used_ms >= _USE_GRAIN_MS:
            self._db.run("UPDATE tokens SET last_used_ms = $1 WHERE id = $2", now_ms, token.id)
        project_id, team, name, created_ms = found
        return token, Project(id=project_id, team=team, name=name, created_ms=created_ms)

    def of_text_everywhere(self, text: str) -> Token | None:
        """Return the token with this text, even if it is expired or revoked."""
        digest = digest_of(text)
        token = _TABLE.find(self._db, "digest = {}", digest)
        return token if token is not None and hmac.compare_digest(token.digest, digest) else None

    def find(self, token_id: str) -> Token | None:
        return _TABLE.find(self._db, "id = {}", token_id)

    def revoke(self, project: str, token_id: str, *, now_ms: int) -> Token:
        """End a token permanently. Revoking it again keeps the first time."""
        self._db.run(
            "UPDATE tokens SET revoked_ms = $1 WHERE project = $2 AND id = $3 AND revoked_ms IS NULL",
            now_ms,
            project,
            token_id,
        )
        found = _TABLE.find(self._db, "project = {} AND id = {}", project, token_id)
        if found is None:
            raise NotFound(f"no token {token_id}", kind="token", name=token_id)
        return found

    def of_project(self, project: str) -> list[Token]:
        return _TABLE.select(self._db, "project = {}", project, order="created_ms, id")
