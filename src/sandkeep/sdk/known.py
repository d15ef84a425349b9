"""What a handle knows of its sandbox: as the server last told it, the same in both colours."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from sandkeep.errors import InvalidRequest
from sandkeep.sdk.values import Route, SandboxInfo, Session, ShownPolicy, Usage
from sandkeep.types import Mount, Resources, SessionStatus, SnapshotRetention
from sandkeep.wire.responses import SandboxStarted


class KnownSandbox:
    """The state of a sandbox, its latest session and where its ports are reached."""

    _state: SandboxInfo
    _session: Session
    _routes: tuple[Route, ...]

    def _adopt(self, started: SandboxStarted) -> None:
        self._state = SandboxInfo.of(started.sandbox)
        self._session = Session.of(started.session)
        self._routes = tuple(Route.of(route) for route in started.routes)

    @property
    def name(self) -> str:
        """Unique in its project; never changes."""
        return self._state.name

    @property
    def status(self) -> SessionStatus:
        """The status of its latest session."""
        return self._state.status

    @property
    def current_session(self) -> Session:
        """Its latest session, running or over."""
        return self._session

    @property
    def image(self) -> str | None:
        """The image its sessions run on."""
        return self._state.image

    @property
    def runtime(self) -> str | None:
        """The runtime it was asked for by name."""
        return self._state.runtime

    @property
    def resources(self) -> Resources:
        """Processors and memory of new sessions."""
        return self._state.resources

    @property
    def persistent(self) -> bool:
        """Whether its files are kept between sessions."""
        return self._state.persistent

    @property
    def tags(self) -> Mapping[str, str]:
        """Labels to find it by."""
        return self._state.tags

    @property
    def mounts(self) -> Mapping[str, Mount]:
        """Drives, by where new sessions see them."""
        return self._state.mounts

    @property
    def cwd(self) -> str:
        """Where relative paths and processes start."""
        return self._state.cwd

    @property
    def network_policy(self) -> ShownPolicy | None:
        """What new sessions may reach, without the values rules inject."""
        return self._state.network_policy

    @property
    def execution_time_limit(self) -> timedelta:
        """How long each new session lives."""
        return self._state.execution_time_limit

    @property
    def expires_at(self) -> datetime | None:
        """When the running session will be stopped."""
        return self._state.expires_at

    @property
    def current_snapshot_id(self) -> str | None:
        """The snapshot the next session starts from."""
        return self._state.current_snapshot_id

    @property
    def snapshot_expiration(self) -> timedelta | None:
        """How long its snapshots live unless said otherwise; zero is for ever."""
        return self._state.snapshot_expiration

    @property
    def snapshot_retention(self) -> SnapshotRetention | None:
        """How many snapshots are kept."""
        return self._state.snapshot_retention

    @property
    def created_at(self) -> datetime:
        """When it was created."""
        return self._state.created_at

    @property
    def routes(self) -> tuple[Route, ...]:
        """Where its ports are reached."""
        return self._routes

    def url(self, port: int) -> str:
        """Where a port of it is reached.

        Raises:
            InvalidRequest: the sandbox was not given this port.
        """
        for route in self._routes:
            if route.port == port:
                return route.url
        known = ", ".join(str(route.port) for route in self._routes) or "none"
        raise InvalidRequest(
            f"port {port} of {self.name} is not open; open ports: {known}",
            hint="give ports to create_sandbox() or update()",
            field="port",
        )

    @property
    def usage(self) -> Usage:
        """What its sessions used that had ended when it was last asked."""
        return self._state.usage
