"""One run of a command: the server it talks to, and how it prints."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from sandkeep.cli.output import Output
from sandkeep.cli.progress import Bar, busy, counted, measured, starting

if TYPE_CHECKING:
    from sandkeep.sync import Client, Sandbox

_COMMON = "sandkeep.common"


def common_values(ctx: click.Context) -> dict[str, Any]:
    """Return the values of the common options of a command line, by name; options not given are left out.

    All contexts of a command line share them, so that an option counts before the command and after it.
    """
    values: dict[str, Any] = ctx.meta.setdefault(_COMMON, {})
    return values


class App:
    """What a command is given: the client of the server, standard output, and progress on a terminal."""

    def __init__(self, values: dict[str, Any], *, seconds: float = 60.0) -> None:
        """
        Args:
            values: of the common options, by name.
            seconds: the time limit for requests that should be quick.
        """
        self._seconds = seconds
        self.json: bool = values.get("json", False)
        self.quiet: bool = values.get("quiet", False) or "SANDKEEP_QUIET" in os.environ
        self.data_dir: str | None = values.get("data_dir")
        self._url: str | None = values.get("url")
        self._token: str | None = values.get("token")
        self._team: str | None = values.get("team")
        self._project: str | None = values.get("project")
        self.out = Output(quiet=self.quiet)
        if self.data_dir is not None:
            # The SDK finds the data directory by this variable. An option on the command line counts for more
            # than a server named in the environment.
            os.environ["SANDKEEP_HOME"] = os.path.abspath(self.data_dir)
            os.environ.pop("SANDKEEP_URL", None)

    @cached_property
    def client(self) -> Client:
        """The client. It connects on first use, and starts the embedded server if that does not run."""
        from sandkeep.sync import Client

        return Client(
            self._url, token=self._token, team=self._team, project=self._project, timeout=self._seconds
        )

    def close(self) -> None:
        if "client" in self.__dict__:
            self.client.close()

    @property
    def url(self) -> str | None:
        """The URL of the server; ``None`` is the embedded server."""
        return self._url or os.environ.get("SANDKEEP_URL") or None

    @property
    def team(self) -> str | None:
        return self._team or os.environ.get("SANDKEEP_TEAM") or None

    @property
    def project(self) -> str | None:
        return self._project or os.environ.get("SANDKEEP_PROJECT") or None

    def sandbox(self, name: str, *, auto_resume: bool | None = None) -> Sandbox:
        """Return a handle for an existing sandbox, without starting it.

        With ``auto_resume`` its operations start a session if none runs, also one without earlier files.
        """
        return self.client.get_sandbox(name, auto_resume=auto_resume)

    def note(self, text: str) -> None:
        """Print something that is not a result, on standard error; not with ``--quiet``."""
        if not self.quiet:
            click.echo(text, err=True)

    def busy(self, text: str) -> AbstractContextManager[Callable[[str], None]]:
        return busy(text, quiet=self.quiet or self.json)

    def starting(self, text: str) -> AbstractContextManager[None]:
        return starting(text, quiet=self.quiet or self.json)

    def counted(self, text: str, total: int) -> AbstractContextManager[Callable[[], None]]:
        return counted(text, total, quiet=self.quiet or self.json)

    def bar(self, text: str) -> AbstractContextManager[Bar]:
        return measured(text, quiet=self.quiet or self.json)
