"""References: plain values that name a sandbox or a process, and the server it is on.

They can be pickled, and ``dataclasses.asdict`` makes them JSON; ``bind`` returns a handle for one. They hold
no credentials: the client that binds one uses its own.
"""

from __future__ import annotations

from sandkeep.checks import expect, refuse
from sandkeep.dataclass import dataclass
from sandkeep.errors import InvalidRequest
from sandkeep.sdk.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    url: str
    """URL of the server, as seen by the client that made the reference."""
    team: str | None = None
    """``None`` means the team of the client that binds it."""
    project: str | None = None
    """``None`` means the project of the client that binds it."""

    def __post_init__(self) -> None:
        self._require("url", self.url)
        for name, value in (("team", self.team), ("project", self.project)):
            if value is not None:
                self._require(name, value)

    @staticmethod
    def _require(field: str, value: object) -> None:
        expect(field, value, str, "text")
        if not value:
            refuse(field, "must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxReference(_Reference):
    """A sandbox, by its name: returned by :meth:`Sandbox.reference`, accepted by :meth:`Client.bind`."""

    name: str

    def __post_init__(self) -> None:
        _Reference.__post_init__(self)
        self._require("name", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReference(_Reference):
    """A process, by its id: returned by :meth:`Process.reference`, accepted by :meth:`Client.bind`."""

    id: str
    session_id: str
    """The session it runs or ran in."""

    def __post_init__(self) -> None:
        _Reference.__post_init__(self)
        self._require("id", self.id)
        self._require("session_id", self.session_id)


def check(reference: SandboxReference | ProcessReference, target: Target) -> None:
    """Refuse a reference to another server or team, where the same name means something else."""
    expect("reference", reference, _Reference, "a SandboxReference or a ProcessReference")
    if reference.url != target.address:
        raise InvalidRequest(
            f"the reference is to {reference.url}, but the client uses {target.address}",
            hint="bind it with Client(reference.url, …) or, if that is the same server, "
            "dataclasses.replace(reference, url=client.url)",
            field="reference.url",
        )
    if None not in (reference.team, target.team) and reference.team != target.team:
        raise _elsewhere("team", reference.team, target.team)


def check_project(reference: SandboxReference, found: str | None) -> None:
    """Refuse a reference to a sandbox of another project than the one found."""
    if None not in (reference.project, found) and reference.project != found:
        raise _elsewhere("project", reference.project, found)


def _elsewhere(what: str, wanted: str | None, found: str | None) -> InvalidRequest:
    return InvalidRequest(
        f"the reference is to {what} {wanted}, but the client uses {what} {found}",
        hint=f"bind it with Client({what}=reference.{what}, …)",
        field=f"reference.{what}",
    )
