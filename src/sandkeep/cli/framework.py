"""What every command is made of: common options, help in one shape, and the connection it works on.

A command is a function that takes an :class:`App` and its own parameters, decorated with :func:`command`.
The options that all commands share (which server, JSON or not, quiet, debug) are added here and end up in the
App.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sandkeep.cli.output import Output, span
from sandkeep.cli.progress import Bar, busy, measured
from sandkeep.errors import InvalidRequest

if TYPE_CHECKING:
    from sandkeep.sync import Client, Sandbox

F = TypeVar("F", bound=Callable[..., Any])

OPTIONS, COMMON = "Options", "Common options"
_OPTION_OF = {
    "allow_subnets": "allowed_cidr",
    "deny_subnets": "denied_cidr",
    "domains": "allowed_domain",
    "execution_time_limit": "timeout",
    "sandbox": "name",
    "session_id": "session",
    "snapshot_id": "snapshot",
    "snapshot_retention": "keep_last_snapshots",
}
"""Options whose names are not those of the fields they set."""
WIDTH = 100
"""Columns of help text, where the terminal has as many."""


class App:
    """One invocation: where it connects and how it speaks."""

    def __init__(self, values: dict[str, Any], *, seconds: float = 60.0) -> None:
        """
        Args:
            values: of the common options, by name.
            seconds: how long to wait for what should be quick.
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
            # Named on this command line, so it counts for more than a server from the environment.
            os.environ["SANDKEEP_HOME"] = os.path.abspath(self.data_dir)
            os.environ.pop("SANDKEEP_URL", None)

    @cached_property
    def client(self) -> Client:
        """The server, reached when it is first asked something; started when it is ours and does not run."""
        from sandkeep.sync import Client

        return Client(
            self._url, token=self._token, team=self._team, project=self._project, timeout=self._seconds
        )

    def close(self) -> None:
        if "client" in self.__dict__:
            self.client.close()

    @property
    def url(self) -> str | None:
        """The server asked for; ``None`` is the embedded one."""
        return self._url or os.environ.get("SANDKEEP_URL") or None

    def sandbox(self, name: str) -> Sandbox:
        """A handle for an existing sandbox; starts nothing."""
        return self.client.get_sandbox(name)

    def note(self, text: str) -> None:
        """Something worth knowing that is no result."""
        if not self.quiet:
            click.echo(text, err=True)

    def busy(self, text: str) -> AbstractContextManager[None]:
        return busy(text, quiet=self.quiet or self.json)

    def bar(self, text: str) -> AbstractContextManager[Bar]:
        return measured(text, quiet=self.quiet or self.json)


# --- parameters ------------------------------------------------------------------------------------------


class Option(click.Option):
    """An option under a heading of the help text."""

    def __init__(self, *args: Any, section: str = OPTIONS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Argument(click.Argument):
    """An argument with a line of help."""

    def __init__(self, *args: Any, help: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.about = help

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """What it is called in a sentence: without what usage lines have around it."""
        return (self.metavar or "").strip("[]").removeprefix("--] ").removesuffix("...")


def option(*names: str, section: str = OPTIONS, **kwargs: Any) -> Callable[[F], F]:
    return click.option(*names, cls=Option, section=section, **kwargs)


def absent(why: str) -> dict[str, Any]:
    """Makes an option that people know from elsewhere refuse its value, with the reason."""

    def refuse(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            raise click.BadParameter(why, ctx, param)

    return {"hidden": True, "expose_value": False, "callback": refuse}


def argument(name: str, *, metavar: str, help: str, **kwargs: Any) -> Callable[[F], F]:
    return click.argument(name, cls=Argument, metavar=metavar, help=help, **kwargs)


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order they are listed."""

    def add(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return add


def sandbox_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names to complete with: those of a server that runs already, since pressing Tab must start nothing."""
    from sandkeep.cli.completion import names_of_sandboxes

    return names_of_sandboxes(_kept(ctx), incomplete)


def sandbox_argument(**kwargs: Any) -> Callable[[F], F]:
    help_text = kwargs.pop("help", "The sandbox.")
    shown = "NAME..." if kwargs.get("nargs") == -1 else "NAME"
    return argument("name", metavar=shown, help=help_text, shell_complete=sandbox_names, **kwargs)


def _common(*, connection: bool, json: bool) -> list[click.Parameter]:
    found: list[click.Parameter] = []

    def add(*names: str, **kwargs: Any) -> None:
        found.append(Option(names, section=COMMON, expose_value=False, callback=_keep, **kwargs))

    if json:
        add("--json", is_flag=True, help="Print JSON.")
    if connection:
        add("--url", metavar="URL", help="The server: http(s)://… or unix:///path [env: SANDKEEP_URL]")
        add("--token", metavar="TOKEN", help="Who asks [env: SANDKEEP_TOKEN]")
        add("--project", metavar="PROJECT", help="Where names are looked up [env: SANDKEEP_PROJECT]")
        add("--team", "--scope", metavar="TEAM", help="Whose projects; a token's own [env: SANDKEEP_TEAM]")
    add("--data-dir", metavar="PATH", help="Where sandboxes live on this machine [env: SANDKEEP_HOME]")
    add("-q", "--quiet", is_flag=True, help="Print results and errors only.")
    add("--debug", is_flag=True, help="Show a traceback when something fails.")
    return found


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if param.name is not None:
        ctx.meta[f"sandkeep.{param.name}"] = value


def _kept(ctx: click.Context) -> dict[str, Any]:
    """The common options of a command line."""
    prefix = "sandkeep."
    return {key[len(prefix) :]: value for key, value in ctx.meta.items() if key.startswith(prefix)}


# --- commands --------------------------------------------------------------------------------------------


class Command(click.Command):
    """A command with the common options, whose help has the same sections everywhere."""

    examples: Sequence[tuple[str, str]] = ()

    def invoke(self, ctx: click.Context) -> Any:
        ctx.obj = App(_kept(ctx))
        try:
            return super().invoke(ctx)
        except InvalidRequest as error:
            error.message = self._in_our_terms(error)
            error.hint = error.hint or f"'{ctx.command_path} --help' explains it"
            raise
        except BrokenPipeError:
            from sandkeep.cli.ending import ReaderGone

            raise ReaderGone from None
        finally:
            ctx.obj.close()

    def _in_our_terms(self, error: InvalidRequest) -> str:
        """What cannot be, by the name of the option that said it."""
        field, problem = str(error.details.get("field", "")), error.details.get("problem", error.message)
        root, _, inside = field.partition("[")
        root = root.partition(".")[0]
        if inside.startswith('"'):
            problem = f"{inside[1:-2]!r} {problem}"
        if "maximum_ms" in error.details:
            problem = f"a session lives {span(timedelta(milliseconds=error.maximum_ms))} at most"
        for param in self.params:
            if isinstance(param, Option) and param.name in (root, _OPTION_OF.get(root)):
                return f"{param.opts[-1]}: {problem}"
        return error.message if "maximum_ms" not in error.details else problem

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return ["-h", "--help"]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(param.metavar or "", param.about) for param in self.params if isinstance(param, Argument)]
        if rows:
            with formatter.section("Arguments"):
                formatter.write_dl(rows)
        for section, records in self._sections(ctx):
            with formatter.section(section):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                formatter.write_dl([(line, what) for what, line in self.examples], col_max=60)

    def _sections(self, ctx: click.Context) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        found: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                section = param.section if isinstance(param, Option) else COMMON
                found.setdefault(section, []).append(record)
        common = found.pop(COMMON, [])
        yield from found.items()
        if common:
            yield COMMON, common


def command(
    name: str,
    *,
    connection: bool = True,
    json: bool = True,
    cls: type[Command] = Command,
    examples: Sequence[tuple[str, str]] = (),
) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a command; its docstring is the help text."""

    def make(function: Callable[..., Any]) -> Command:
        settings = {"max_content_width": WIDTH}
        made = click.command(name, cls=cls, context_settings=settings)(click.pass_obj(function))
        made.params += _common(connection=connection, json=json)
        made.examples = examples
        return made

    return make


class Group(click.Group):
    """Commands about one noun."""

    def __init__(
        self,
        name: str,
        help: str,
        *,
        aliases: dict[str, str] | None = None,
        absent: dict[str, str] | None = None,
    ) -> None:
        """
        Args:
            name: the noun.
            help: what the commands are for.
            aliases: other names, and the commands they stand for.
            absent: commands people know from elsewhere, and why there are none here.
        """
        super().__init__(name, help=help)
        self.aliases = aliases or {}
        self.absent = absent or {}

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return ["-h", "--help"]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, self.aliases.get(cmd_name, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            why = self.absent.get(args[0])
            known = f"; there are {', '.join(self.commands)}" if why is None else f": {why}"
            raise click.UsageError(f"no command {args[0]!r}{known}", ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            known = ", ".join(self.commands)
            raise click.UsageError(f"say what to do: {known}", ctx)
        return super().parse_args(ctx, args)


@contextmanager
def several(app: App, results: list[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """One of several things to be done: a failure is told and noted, and the others go on."""
    from sandkeep.cli.ending import hint_for, say
    from sandkeep.errors import SandkeepError

    result: dict[str, Any] = {"name": name}
    results.append(result)
    try:
        yield result
    except SandkeepError as error:
        say(error.message, hint_for(error))
        result["error"] = error.to_json()


def finish(app: App, results: list[dict[str, Any]]) -> None:
    """After all of them: what became of each, and failure if one failed."""
    from sandkeep.cli.ending import FAILED, Ended

    if app.json:
        app.out.json(results)
    if any("error" in result for result in results):
        raise Ended(FAILED)
