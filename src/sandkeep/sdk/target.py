"""Which server to use, and with which credentials, team and project.

Arguments come first, then ``SANDKEEP_URL``, ``SANDKEEP_TOKEN``, ``SANDKEEP_TEAM`` and ``SANDKEEP_PROJECT``.
Without a URL it is the embedded server of the data directory, over a unix socket, without credentials.
"""

from __future__ import annotations

import os
import sys
from dataclasses import field

from sandkeep.checks import refuse
from sandkeep.dataclass import dataclass
from sandkeep.paths import data_directory

SOCKET_NAME = "server.sock"


@dataclass(frozen=True, slots=True)
class Target:
    """A server. ``socket`` is set if it is reached through a unix socket."""

    url: str
    """Scheme, authority and the path before every route, without a trailing slash."""
    socket: str | None
    embedded: str | None
    """The data directory of an embedded server, which the client may start."""
    token: str | None = field(repr=False)
    team: str | None
    project: str | None

    @property
    def address(self) -> str:
        """The server's URL as shown to users: without credentials that it may contain."""
        if self.socket is not None:
            return f"unix://{self.socket}"
        from urllib.parse import urlsplit, urlunsplit

        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    @property
    def scope(self) -> dict[str, str]:
        """Query parameters for team and project."""
        team = {} if self.team is None else {"teamId": self.team}
        return team if self.project is None else {**team, "projectId": self.project, "project": self.project}


def resolve(url: str | None, token: str | None, team: str | None, project: str | None) -> Target:
    """Return the target: from the arguments, else the environment, else the embedded server."""
    url = url or os.environ.get("SANDKEEP_URL") or None
    token = token or os.environ.get("SANDKEEP_TOKEN") or None
    team = team or os.environ.get("SANDKEEP_TEAM") or None
    project = project or os.environ.get("SANDKEEP_PROJECT") or None
    if url is None:
        if sys.platform != "linux":
            refuse("url", "name a server, here or with SANDKEEP_URL: sandboxes run on Linux only")
        directory = data_directory()
        path = os.path.join(directory, SOCKET_NAME)
        return Target("http://localhost", path, directory, token, team, project)
    from urllib.parse import urlsplit  # slow to import, and the embedded server needs none

    parts = urlsplit(url)
    if parts.scheme == "unix":
        if sys.platform != "linux":
            refuse("url", "unix sockets are used on Linux only: name a server with http:// or https://")
        if not parts.path or parts.netloc:
            refuse("url", "a unix socket must be spelled unix:///path/to/server.sock")
        return Target("http://localhost", parts.path, None, token, team, project)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        refuse("url", f"{url!r} must begin with http://, https:// or unix://")
    if parts.query or parts.fragment:
        refuse("url", "must not have a query string or a fragment")
    return Target(url.rstrip("/"), None, None, token, team, project)
