"""The option layer: a verb's options are the parameters of its function, each declared once.

    @verb
    def probe(
        terminal: Terminal,
        *,
        uri: str = argument("URI", TEXT, "Storage to measure."),
        size_bytes: int = option("--size", SIZE, "Bytes that each measurement moves.", default="2GiB"),
        reading: ReadOptions = group(ReadOptions),
    ) -> int | None:
        ...

A declaration holds the name, the parser, the help text and the default; everything else (click's parameters,
`--help`, completion, the values that the function receives) is derived from it. The return type of a
declaring function is its parser's type, so that a type checker compares each annotation with its parser.

An option that several verbs share is a constant with the same name everywhere: `page: Path | None = PAGE`.
Options that belong together are the fields of a dataclass, which `group` declares.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from textwrap import dedent
from typing import Any, Concatenate, TypeVar, overload

import click
from click.shell_completion import CompletionItem

from penstock.cli.parsers import Parser
from penstock.cli.terminal import Terminal
from penstock.errors import UsageError
from penstock.optional_libraries import missing_library

T = TypeVar("T")
O = TypeVar("O")  # noqa: E741 - a group of options
Fields = dict[str, dataclasses.Field[Any]]
"""Declared options by the name of their parameter, or of their field in a group."""
_KEY = "penstock option"
_NESTED = "__"
"""Joins the name of a group and that of its field: GROUP__FIELD."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One option or argument. Arguments have no names, flags have no parser."""

    names: tuple[str, ...]
    help: str
    parser: Parser[Any] | None = None
    metavar: str = ""
    default: str | None = None
    is_required: bool = False
    is_repeated: bool = False
    panel: str | None = None
    """The option's heading in `--help`; None for the default heading."""


@overload
def option(
    name: str,
    parser: Parser[T],
    text: str,
    *,
    default: str,
    short: str = "",
    metavar: str = "",
    panel: str | None = None,
) -> T: ...
@overload
def option(
    name: str,
    parser: Parser[T],
    text: str,
    *,
    default: None = None,
    short: str = "",
    metavar: str = "",
    panel: str | None = None,
) -> T | None: ...
def option(name: str, parser: Parser[Any], text: str, *, short: str = "", **more: Any) -> Any:
    """Declare an option. `default` is a string for the parser; without it, the default is None."""
    return _field((short, name), text, parser, **more)


def required(name: str, parser: Parser[T], text: str, *, short: str = "", metavar: str = "") -> T:
    """Declare an option that must be given."""
    return _field((short, name), text, parser, metavar=metavar, is_required=True)  # type: ignore[no-any-return]


def repeated(
    name: str, parser: Parser[T], text: str, *, short: str = "", panel: str | None = None
) -> tuple[T, ...]:
    """Declare an option that may be given several times."""
    return _field((short, name), text, parser, is_repeated=True, panel=panel)  # type: ignore[no-any-return]


def flag(name: str, text: str) -> bool:
    """Declare a flag, False unless it is given."""
    return _field((name,), text)  # type: ignore[no-any-return]


def switch(name: str, text: str) -> bool | None:
    """Declare a pair of flags, `--name/--no-name`, whose value is None if neither is given."""
    return _field((f"{name}/--no-{name[2:]}",), text)  # type: ignore[no-any-return]


def argument(metavar: str, parser: Parser[T], text: str) -> T:
    """Declare an argument that must be given."""
    return _field((), text, parser, metavar=metavar, is_required=True)  # type: ignore[no-any-return]


@overload
def optional_argument(metavar: str, parser: Parser[T], text: str, *, default: str) -> T: ...
@overload
def optional_argument(metavar: str, parser: Parser[T], text: str, *, default: None = None) -> T | None: ...
def optional_argument(metavar: str, parser: Parser[Any], text: str, *, default: str | None = None) -> Any:
    """Declare an argument that may be left out."""
    return _field((), text, parser, metavar=metavar, default=default)


def arguments(metavar: str, parser: Parser[T], text: str, *, is_required: bool = True) -> tuple[T, ...]:
    """Declare all remaining arguments."""
    return _field(  # type: ignore[no-any-return]
        (), text, parser, metavar=metavar, is_required=is_required, is_repeated=True
    )


def group(options: type[O], *, panel: str | None = None) -> O:
    """Declare all options of another dataclass; `panel` gives them a separate heading in `--help`."""
    return dataclasses.field(default_factory=options, metadata={_KEY: options, "panel": panel})


def _field(names: tuple[str, ...], text: str, parser: Parser[Any] | None = None, **more: Any) -> Any:
    """Return a field for a dataclass or a signature; type checkers take it for the option's value."""
    declaration = Declaration(names=tuple(filter(None, names)), help=text, parser=parser, **more)
    metadata = {_KEY: declaration}
    if declaration.is_required:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default_factory=lambda: default_value(declaration), metadata=metadata)


def default_value(declaration: Declaration) -> Any:
    """Return an omitted option's value, parsed only now: a parser may import the type of its values."""
    if declaration.is_repeated:
        return ()
    if declaration.parser is None:
        return None if "/" in declaration.names[0] else False
    return None if declaration.default is None else declaration.parser(declaration.default)


def options_of(declaring: Callable[..., Any]) -> Fields:
    """Return the options that a function or a dataclass declares, without its other parameters or fields."""
    if isinstance(declaring, type):
        fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(declaring)}
    else:
        parameters = inspect.signature(declaring).parameters.values()
        fields = {parameter.name: parameter.default for parameter in parameters}
    return {
        name: field
        for name, field in fields.items()
        if isinstance(field, dataclasses.Field) and _KEY in field.metadata
    }


def declarations(fields: Fields) -> Iterator[tuple[str, Declaration, str | None]]:
    """Yield the path, declaration and help panel of each option. A group's options stand in its place."""
    for name, field in fields.items():
        declared = field.metadata[_KEY]
        if isinstance(declared, type):
            for path, declaration, panel in declarations(options_of(declared)):
                yield f"{name}{_NESTED}{path}", declaration, panel or field.metadata["panel"]
        else:
            yield name, declared, declared.panel


def fill(fields: Fields, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Map each parameter's name to click's value, or to the default if the option was omitted."""
    filled: dict[str, Any] = {}
    for name, field in fields.items():
        declared, path = field.metadata[_KEY], f"{prefix}{name}"
        if isinstance(declared, type):
            filled[name] = declared(**fill(options_of(declared), values, f"{path}{_NESTED}"))
        else:
            # Click passes None or () for an omitted option, whatever its default is.
            is_given = values.get(path) not in (None, ())
            filled[name] = values[path] if is_given else default_value(declared)
    return filled


class _ParsedType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """One of our parsers as a click type, whose errors name the option."""

    def __init__(self, parser: Parser[Any]) -> None:
        self.name = parser.metavar
        self._parser = parser

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        try:
            return self._parser(value)
        except UsageError as error:
            place = param.human_readable_name if isinstance(param, click.Argument) else None
            where = place or (param.opts[-1] if param else "")
            raise UsageError(error.what, where=where, fix=error.fix) from error

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002 - click's signature
        incomplete: str,
    ) -> list[CompletionItem]:
        if self._parser.list_names is not None:
            parent = str(ctx.params.get("parent") or "")
            names = [name for name in self._parser.list_names(parent) if name.startswith(incomplete)]
            return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]
        if self._parser.completes:
            return [CompletionItem(incomplete, type=self._parser.completes)]
        return [CompletionItem(word) for word in self._parser.choices if word.startswith(incomplete)]


def _parameter(path: str, declaration: Declaration) -> click.Parameter:
    parser = declaration.parser
    if parser is not None and not declaration.names:
        return click.Argument(
            [path],
            required=declaration.is_required,
            nargs=-1 if declaration.is_repeated else 1,
            metavar=declaration.metavar,
            type=_ParsedType(parser),
        )
    if parser is None:
        return click.Option(
            [*declaration.names, path],
            is_flag=True,
            default=default_value(declaration),
            help=declaration.help,
        )
    return click.Option(
        [*declaration.names, path],
        required=declaration.is_required,
        multiple=declaration.is_repeated,
        metavar=declaration.metavar or parser.metavar,
        type=_ParsedType(parser),
        help=declaration.help,
    )


JSON_OPTION: dict[str, Any] = {"as_json": flag("--json", "Print the result as one JSON document on stdout.")}
"""The option of every command that prints a result."""


class Verb(click.Command):
    """A command made of declared options; `--help` shows `document` and the options' help texts."""

    def __init__(
        self, document: str, fields: Fields, call: Callable[[Mapping[str, Any]], int | None], **more: Any
    ) -> None:
        text, _, examples = inspect.cleandoc(document).partition("\nExamples:\n")
        self.declared = list(declarations(fields))
        parameters = [_parameter(path, declaration) for path, declaration, _ in self.declared]

        def callback(**values: Any) -> None:
            if code := call(values):
                raise click.exceptions.Exit(code)

        super().__init__(None, params=parameters, help=text, callback=callback, **more)
        self.examples = [dedent(example).strip() for example in examples.split("\n\n") if example.strip()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples, arguments and options, with a heading for each panel of options."""
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write("".join(f"  {line}\n" for line in example.splitlines()))
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter, (_, declaration, panel) in zip(self.params, self.declared, strict=True):
            if not declaration.names:
                panels["Arguments"].append((declaration.metavar, _describe(declaration)))
            else:
                spelled = (parameter.get_help_record(ctx) or ("",))[0]
                panels.setdefault(panel or "Options", []).append((spelled, _describe(declaration)))
        panels["Options"].append(("-h, --help", "Show this message and exit."))
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _describe(declaration: Declaration) -> str:
    text = declaration.help
    if declaration.names and declaration.is_required:
        return f"{text}  [required]"
    if declaration.names and declaration.is_repeated:
        return f"{text}  [repeatable]"
    return f"{text}  [default: {declaration.default}]" if declaration.default else text


def verb(
    function: Callable[Concatenate[Terminal, ...], int | None], *, has_json: bool = True, **settings: Any
) -> Verb:
    """Make a command from a function of a terminal and options, which returns the exit code."""
    own = options_of(function)

    def call(values: Mapping[str, Any]) -> int | None:
        return function(Terminal(as_json=bool(values.get("as_json"))), **fill(own, values))

    return Verb(function.__doc__ or "", own | JSON_OPTION if has_json else own, call, **settings)


class Group(click.Group):
    """Commands by name. Each is imported only when it is used, so that the root's `--help` imports little.

    `extra` names the optional dependencies that these commands need; errors about missing libraries name it.
    """

    def __init__(
        self,
        text: str,
        verbs: Mapping[str, str | click.Command],
        *,
        extra: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(None, help=text, no_args_is_help=True, **more)
        self.verbs = dict(verbs)
        """Each command, or its location as `module:name`."""
        self.extra = extra

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the words name; an error about a missing library names the extra."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if missing := missing_library(error, extra=self.extra):
                raise missing from error
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return all names, in the order in which help lists them."""
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return the command of this name."""
        target = self.verbs.get(cmd_name)
        if not isinstance(target, str):
            return target
        module, _, name = target.partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first word names; an error suggests the nearest name."""
        from penstock.did_you_mean import did_you_mean

        name = args[0]
        if name not in self.verbs and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(
                f"No such command {name!r}. {did_you_mean(name, self.verbs)}".rstrip(), ctx
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the first sentence of its help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.verbs]
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, " ".join((command.help or "").partition("\n\n")[0].split()))
                    for name, command in commands
                    if command
                ]
            )


def refuse_ignored(names: tuple[str, ...], why: str, *, fix: str = "Leave it out.") -> None:
    """Raise an error if the user gave any of the options `names`, because the command would ignore them."""
    context = click.get_current_context()
    given = {
        parameter.opts[-1]
        for parameter in context.command.params
        if context.params.get(parameter.name or "") not in (None, (), False)
    }
    if ignored := [name for name in names if name in given]:
        raise UsageError(f"{' and '.join(ignored)} would be ignored: {why}", fix=fix)


def command_line() -> tuple[str, ...]:
    """Return the running command as a user would type it; runs record it."""
    return ("penstock", *(click.get_current_context().find_root().obj or ()))
