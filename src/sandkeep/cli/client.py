"""The SDK's client with what the SDK has no words for: a team, and where sandboxes are said to be placed.

A token acts for one team, so a choice of team is for those who come over the unix socket. Region, failover
regions and network are kept by the server and shown to official clients, which ask for them; nothing depends
on them here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Unpack

from sandkeep import sync
from sandkeep.sdk import bodies
from sandkeep.sdk.target import Target
from sandkeep.sdk.values import given
from sandkeep.sync.sandbox import Hook, start_fork
from sandkeep.sync.transport import read, segment
from sandkeep.wire.responses import SandboxStarted, SandboxUpdated, SnapshotTree


@dataclass(frozen=True)
class TeamTarget(Target):
    """A server, and the team to act for."""

    team: str

    @property
    def scope(self) -> dict[str, str]:
        return {**super().scope, "teamId": self.team}


class Client(sync.Client):
    """A connection of the command line."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None,
        project: str | None,
        team: str | None,
        timeout: float,
    ) -> None:
        super().__init__(url, token=token, project=project, timeout=timeout)
        if team is not None:
            known = self._transport.target
            values = {field.name: getattr(known, field.name) for field in fields(known)}
            self._transport.target = TeamTarget(**values, team=team)
        self.placement: dict[str, Any] = {}
        """What to say about what is made: ``region``, ``failoverRegions``, ``networkId``."""

    def fork_sandbox(
        self,
        source: str,
        name: str | None = None,
        *,
        destroy: bool = True,
        **changes: Unpack[bodies.Configuration],
    ) -> sync.Sandbox:
        body = {**bodies.configuration(name=name, **changes), **self.placement}
        return start_fork(self._transport, source, body, destroy=destroy)

    def snapshot_line(
        self, anchor: str, *, limit: int, descendants: bool, beyond: bool
    ) -> sync.Page[sync.SnapshotNode]:
        """A page of the line of a snapshot: its ancestors, or its newest descendants.

        ``beyond``: without the snapshot itself, which ended an earlier page. The cursor is a snapshot.
        """
        query = {
            "snapshotId": anchor,
            "limit": str(limit),
            "sortOrder": "asc" if descendants else "desc",
        }
        answer = self._transport.request("GET", "/v2/sandboxes/snapshots/tree", query=query)
        shown = read(SnapshotTree, answer)
        found = [*([] if beyond else [shown.anchor]), *shown.snapshots]
        nodes = tuple(sync.SnapshotNode.of(node) for node in found[:limit])
        more = len(found) > limit or shown.pagination.next is not None
        return sync.Page(nodes, nodes[-1].snapshot.id if more else None)

    def placement_of(self, name: str) -> dict[str, Any]:
        """What is recorded of a sandbox."""
        answer = self._transport.request("GET", f"/v2/sandboxes/{segment(name)}", query={"resume": "false"})
        return _placement(read(SandboxStarted, answer))

    def place(self, name: str, placement: dict[str, Any]) -> dict[str, Any]:
        """Record something else; what is not named stays. Returns all that is recorded then."""
        answer = self._transport.request("PATCH", f"/v2/sandboxes/{segment(name)}", json=placement)
        return _placement(read(SandboxUpdated, answer))

    def _drive(
        self, method: str, name: str, below: str = "", *, body: dict[str, Any] | None = None
    ) -> sync.Drive:
        if body is not None:
            body = {**body, **self.placement}
        return super()._drive(method, name, below, body=body)

    def _create(self, body: dict[str, Any], *, destroy: bool, on_resume: Hook | None) -> sync.Sandbox:
        return super()._create({**body, **self.placement}, destroy=destroy, on_resume=on_resume)


def _placement(shown: SandboxStarted | SandboxUpdated) -> dict[str, Any]:
    found = shown.sandbox
    return {
        "region": given(found.region),
        "failoverRegions": given(found.failover_regions) or [],
        "networkId": given(found.network_id),
    }
