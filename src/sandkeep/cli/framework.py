"""What every command is made of: common options, help in one shape, and the checks of a command line.

A command is a function that takes an :class:`App` and its own parameters, decorated with :func:`command`.
The options that all commands share (which server, JSON or not, quiet, debug) are added here and end up in the
App.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import click

from sandkeep.cli.app import App, common_values
from sandkeep.cli.completion import sandbox_names
from sandkeep.cli.output import span
from sandkeep.errors import InvalidRequest

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

OPTIONS, COMMON = "Options", "Common options"
_OPTION_OF = {
    "allow_subnets": "allowed_cidr",
    "deny_subnets": "denied_cidr",
    "diskMb": "disk",
    "disk_mb": "disk",
    "domains": "allowed_domain",
    "execution_time_limit": "timeout",
    "memory_mb": "memory",
    "sandbox": "name",
    "session_id": "session",
    "snapshot_id": "snapshot",
    "snapshot_retention": "keep_last_snapshots",
}
"""Options whose names are not those of the fields they set."""
WIDTH = 100
"""Columns of help text, if the terminal has as many."""


# --- parameters ------------------------------------------------------------------------------------------


class HelpOption(click.Option):
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
        """Return its name for error messages: the metavar without brackets and dots."""
        return (self.metavar or "").strip("[]").removeprefix("--] ").removesuffix("...")


def option(*names: str, section: str = OPTIONS, **kwargs: Any) -> Callable[[F], F]:
    return click.option(*names, cls=HelpOption, section=section, **kwargs)


def absent(why: str) -> dict[str, Any]:
    """Return settings for a hidden option of other tools that refuses every value, and says why."""

    def refuse(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            raise click.BadParameter(why, ctx, param)

    return {"hidden": True, "expose_value": False, "callback": refuse}


def each_once(ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, R], ...]) -> Any:
    """Refuse a key that is given twice with different values, as only one of them could count."""
    found: dict[str, R] = {}
    for key, content in value:
        if found.setdefault(key, content) != content:
            raise click.BadParameter(f"{key} is given twice, with different values", ctx, param)
    return value


def only_one(ctx: click.Context, param: click.Parameter, value: tuple[R, ...]) -> R | None:
    """Refuse an option that is given twice with different values, as only one of them could count."""
    found = tuple(dict.fromkeys(value))
    if len(found) > 1:
        raise click.BadParameter("only one value is allowed", ctx, param)
    return found[0] if found else None


def by_key(ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return pairs as a mapping; refuse a key that is given twice with different values."""
    found: dict[str, str] = {}
    for key, each in value:
        if found.setdefault(key, each) != each:
            raise click.BadParameter(f"{key} is given twice with different values", ctx, param)
    return found


def argument(name: str, *, metavar: str, help: str, **kwargs: Any) -> Callable[[F], F]:
    return click.argument(name, cls=Argument, metavar=metavar, help=help, **kwargs)


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Combine several options into one decorator, in the order they are listed."""

    def add(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return add


def sandbox_argument(**kwargs: Any) -> Callable[[F], F]:
    help_text = kwargs.pop("help", "The sandbox.")
    shown = "NAME..." if kwargs.get("nargs") == -1 else "NAME"
    return argument("name", metavar=shown, help=help_text, shell_complete=sandbox_names, **kwargs)


def common_options(*, connection: bool = True, json: bool = True) -> list[click.Parameter]:
    """Return the options that every command takes.

    Args:
        connection: whether the command talks to a server.
        json: whether the command can print JSON.
    """
    found: list[click.Parameter] = []

    def add(*names: str, **kwargs: Any) -> None:
        found.append(HelpOption(names, section=COMMON, expose_value=False, callback=store_common, **kwargs))

    if json:
        add("--json", is_flag=True, help="Print JSON.")
    if connection:
        add(
            "--url",
            metavar="URL",
            help="Server to use: http(s)://… or unix:///path [env: SANDKEEP_URL]",
        )
        add("--token", metavar="TOKEN", help="Token to authenticate with [env: SANDKEEP_TOKEN]")
        add("--project", metavar="PROJECT", help="Project to work in [env: SANDKEEP_PROJECT]")
        add(
            "--team",
            "--scope",
            metavar="TEAM",
            help="Team that owns the project; a token names its own [env: SANDKEEP_TEAM]",
        )
    add(
        "--data-dir",
        metavar="PATH",
        help="Directory that holds the sandboxes of this machine [env: SANDKEEP_HOME]",
    )
    add("-q", "--quiet", is_flag=True, help="Print only results and errors.")
    add("--debug", is_flag=True, help="Show a traceback when something fails.")
    return found


def leading_options() -> list[click.Parameter]:
    """Return the common options that can also stand before the command."""
    return common_options(json=False)


def store_common(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Store the value of a common option; one after the command replaces one before it."""
    if param.name is not None and value not in (None, False):
        common_values(ctx)[param.name] = value


class _Contextual(click.Command):
    """Adds the context to usage errors that click's parser raises without one."""

    def parse_options(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise


# --- commands --------------------------------------------------------------------------------------------


class Command(_Contextual):
    """A command with the common options, whose help has the same sections everywhere."""

    examples: Sequence[tuple[str, str]] = ()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True  # refused here: click's own error carries them in its English text only
        extra = self.parse_options(ctx, args)
        if extra and not ctx.resilient_parsing:
            raise click.UsageError(f"unexpected: {' '.join(extra)}", ctx)
        return extra

    def invoke(self, ctx: click.Context) -> Any:
        ctx.obj = App(common_values(ctx))
        try:
            return super().invoke(ctx)
        except InvalidRequest as error:
            error.message = self._name_option(error)
            error.hint = error.hint or f"'{ctx.command_path} --help' explains it"
            raise
        finally:
            ctx.obj.close()

    def _name_option(self, error: InvalidRequest) -> str:
        """Return the error's message with the name of the option that set the invalid field."""
        field, problem = str(error.details.get("field", "")), error.details.get("problem", error.message)
        root, _, inside = field.partition("[")
        root, _, limit = root.partition(".")
        root = limit if root == "resources" and limit else root
        if inside.startswith('"'):
            problem = f"{inside[1:-2]!r} {problem}"
        if "maximum_ms" in error.details:
            problem = f"a session can live at most {span(timedelta(milliseconds=error.maximum_ms))}"
        for param in self.params:
            if isinstance(param, HelpOption) and param.name in (root, _OPTION_OF.get(root)):
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
                section = param.section if isinstance(param, HelpOption) else COMMON
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
    """Make a command of a function; its docstring is the help text."""

    def make(function: Callable[..., Any]) -> Command:
        settings = {"max_content_width": WIDTH}
        made = click.command(name, cls=cls, context_settings=settings)(click.pass_obj(function))
        made.params += common_options(connection=connection, json=json)
        made.examples = examples
        return made

    return make


class Group(_Contextual, click.Group):
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
            absent: commands of other tools that do not exist here, and why.
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
        unknown = self.get_command(ctx, args[0]) is None and not args[0].startswith("-")
        if unknown and not ctx.resilient_parsing:
            why = self.absent.get(args[0])
            known = f"; there are {', '.join(self.commands)}" if why is None else f": {why}"
            raise click.UsageError(f"no command {args[0]!r}{known}", ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            known = ", ".join(self.commands)
            raise click.UsageError(f"a command is missing: {known}", ctx)
        return self.parse_options(ctx, args)
