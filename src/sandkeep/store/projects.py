"""Projects: the scopes that names, tokens and lists belong to."""

from __future__ import annotations

from sandkeep.errors import NotFound
from sandkeep.store.database import Database
from sandkeep.store.rows import Project
from sandkeep.store.tables import RowTable

_TABLE = RowTable("projects", Project)


class Projects:
    def __init__(self, db: Database) -> None:
        self._db = db

    def ensure(self, project_id: str, *, team: str, name: str, now_ms: int) -> Project:
        """Return the project of that team and name; create it, with the given id, when it is new."""
        # Reading first keeps the usual case a read, which never waits for another writer.
        found = self.find(team=team, name=name)
        if found is not None:
            return found
        self._db.run(
            "INSERT INTO projects (id, team, name, created_ms) VALUES ($1, $2, $3, $4)"
            " ON CONFLICT (team, name) DO NOTHING",
            project_id,
            team,
            name,
            now_ms,
        )
        found = self.find(team=team, name=name)
        assert found is not None
        return found

    def find(self, *, team: str, name: str) -> Project | None:
        return _TABLE.find(self._db, "team = {} AND name = {}", team, name)

    def get(self, project: str) -> Project:
        found = _TABLE.find(self._db, "id = {}", project)
        if found is None:
            raise NotFound(f"no project {project}", kind="project", name=project)
        return found

    def of_team(self, team: str) -> list[Project]:
        return _TABLE.select(self._db, "team = {}", team, order="name")
