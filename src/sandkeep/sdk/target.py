"""Where the server is and as whom to talk to it.

``SANDKEEP_URL``, ``SANDKEEP_TOKEN``, ``SANDKEEP_TEAM`` and ``SANDKEEP_PROJECT`` say so for a program that
does not. Without a URL it is the embedded server of the data directory, over a unix socket, with no
credentials.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from sandkeep.paths import data_directory
from sandkeep.types import refuse

SOCKET_NAME = "server.sock"


@dataclass(frozen=True, slots=True)
class Target:
    """A server. ``socket`` is set for one reached through a unix socket."""

    url: str
    """Scheme, authority and the path in front of every route, without a slash at the end."""
    socket: str | None
    embedded: str | None
    """The data directory of a server that may be started when none runs."""
    token: str | None = field(repr=False)
    team: str | None
    project: str | None

    @property
    def scope(self) -> dict[str, str]:
        """Query parameters that name the team and the project."""
        team = {} if self.team is None else {"teamId": self.team}
        return team if self.project is None else {**team, "projectId": self.project, "project": self.project}


def resolve(url: str | None, token: str | None, team: str | None, project: str | None) -> Target:
    """Arguments first, then the environment, then the embedded server."""
    url = url or os.environ.get("SANDKEEP_URL") or None
    token = token or os.environ.get("SANDKEEP_TOKEN") or None
    team = team or os.environ.get("SANDKEEP_TEAM") or None
    project = project or os.environ.get("SANDKEEP_PROJECT") or None
    if url is None:
        directory = data_directory()
        path = os.path.join(directory, SOCKET_NAME)
        return Target("http://localhost", path, directory, token, team, project)
    parts = urlsplit(url)
    if parts.scheme == "unix":
        if not parts.path or parts.netloc:
            refuse("url", "a unix socket is written unix:///path/to/server.sock")
        return Target("http://localhost", parts.path, None, token, team, project)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        refuse("url", "must begin with http://, https:// or unix://")
    if parts.query or parts.fragment:
        refuse("url", "must not have a query string or a fragment")
    return Target(url.rstrip("/"), None, None, token, team, project)
