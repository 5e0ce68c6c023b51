"""Pages of the site that are made and not written: commands, Python, decisions, and files of the root.

mkdocs calls `on_files` before it reads the pages (mkdocs.yml).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.app import EXIT_CODES, app
from penstock.cli.options import Declaration, Group, Verb

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = {
    "penstock.checkpoint": "The checkpoint engine: `import penstock.checkpoint as pc`.",
    "penstock.storage": "All storage behind one protocol.",
    "penstock.storage.capabilities": "What a storage may offer beyond the protocol.",
    "penstock.trace": "Spans in your own programs, and traces as tables.",
    "penstock.errors": "Every error that is raised on purpose.",
    "penstock.testing.storage_contract": "The tests that every storage passes.",
    "penstock.testing.faults": "Storages that fail on purpose.",
}
"""Modules that programs outside of this repository import."""

SEARCH = "assets/offline_search.js"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - tests read the pages without mkdocs

    made = {
        "readme.md": relocate((ROOT / "README.md").read_text(encoding="utf-8")),
        "contributing.md": relocate((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")),
        "changelog.md": relocate((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")),
        "examples.md": relocate((ROOT / "examples" / "README.md").read_text(encoding="utf-8")),
        "decisions/index.md": "\n".join(decisions_page()),
        "reference/commands.md": "\n".join(commands_page()),
        "reference/json.md": "\n".join(schemas_page()),
        "reference/python.md": "\n".join(python_page()),
        SEARCH: (ROOT / "scripts" / "site" / "offline_search.js").read_text(encoding="utf-8"),
    }
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to files of the root, as pages of docs/ have them, lead to the pages that are made of them."""
    return markdown.replace("](../examples/README.md", "](examples.md")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001 - mkdocs' signature
    """Load the search for pages without a server from the site itself."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "../" * page.url.count("/") + SEARCH)


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:  # noqa: ARG001
    """Likewise, of the page for names that are not there, which a server shows at any depth."""
    return output.replace("https://unpkg.com/iframe-worker/shim", f"/{SEARCH}")


def relocate(text: str) -> str:
    """A page of the root, as one of docs/: links to docs/ become short, links to code become text."""
    text = re.sub(r"\]\(docs/decisions/?\)", "](decisions/index.md)", text)
    text = (
        text.replace("](docs/", "](")
        .replace("](CONTRIBUTING.md", "](contributing.md")
        .replace("](examples/README.md", "](examples.md")
    )
    text = text.replace("](CHANGELOG.md", "](changelog.md")
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*(?<!\.md)\)", r"\1", text)


def decisions_page() -> Iterator[str]:
    """All decisions with their titles."""
    yield "# Decisions\n"
    yield "Why things are as they are: the problem, the alternatives, the choice and its cost.\n"
    for page in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        yield f"- [{title}]({page.name})"


def schemas_page() -> Iterator[str]:
    """The schemas of JSON documents."""
    yield "# JSON documents\n"
    yield (
        "With `--json`, a command prints one document. Its key `schema` names the command and the version of "
        "the document: keys may be added at any time; the version changes if one goes away or changes its "
        "meaning. Schemas are those of JSON Schema 2020-12. The facts of `penstock cluster collect` have a "
        "`version` instead, and are described in [cluster](../cluster.md); files of results in "
        "[results](../results.md), checkpoints in [their format](../checkpoint-format.md), events in "
        "[traces](../trace.md).\n"
    )
    for path in sorted((ROOT / "docs" / "schemas").glob("*.json")):
        verb, _, version = path.stem.rpartition("-")
        yield f"- [`{verb}/{version}`](../schemas/{path.name})"


def commands_page() -> Iterator[str]:
    """Every verb with its arguments, options and examples, as `--help` has them."""
    yield "# Commands\n"
    yield (
        f"What `--help` prints, for all commands. {EXIT_CODES} A path that does not exist, or is a file "
        "instead of a directory or the reverse, is wrong usage; what the system refuses exits with 1.\n"
    )
    for words, command in walk(app, ("penstock",)):
        yield f"## {' '.join(words)}\n"
        yield from _command(command)


def walk(group: Group, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Verb]]:
    """Every verb with the words that call it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, Group):
            yield from walk(command, (*words, name))
        elif isinstance(command, Verb):
            yield (*words, name), command


def _command(command: Verb) -> Iterator[str]:
    yield f"{command.help}\n"
    if command.examples:
        yield "```sh\n" + "\n".join(command.examples) + "\n```\n"
    yield "| | | |\n|---|---|---|"
    for parameter, (_, declaration, _) in zip(command.params, command.declared, strict=True):
        yield "| " + " | ".join(_cell(text) for text in _row(parameter, declaration)) + " |"
    yield ""


def _row(parameter: click.Parameter, declaration: Declaration) -> tuple[str, str, str]:
    name = (
        ", ".join((*parameter.opts, *parameter.secondary_opts)) if declaration.names else declaration.metavar
    )
    value = (declaration.metavar or (declaration.parser.metavar if declaration.parser else "")) * bool(
        declaration.names
    )
    default = f" Default: `{declaration.default}`." if declaration.default else ""
    required = " Required." if declaration.is_required and declaration.names else ""
    repeated = " May be repeated." if declaration.is_repeated and declaration.names else ""
    return f"`{name}`", f"`{value}`" if value else "", f"{declaration.help}{required}{repeated}{default}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def python_page() -> Iterator[str]:
    """Every public name, from its docstring and its signature."""
    yield "# Python\n"
    yield "Everything that is public. What is not here may change in any release.\n"
    for module, about in PUBLIC.items():
        yield f"## {module}\n\n{about}\n"
        for name in public_names(module):
            yield f"::: {module}.{name}\n    options:\n      heading_level: 3\n"


def public_names(module: str) -> list[str]:
    """The names of `__all__`, else those that the module defines without an underscore."""
    loaded = importlib.import_module(module)
    listed = getattr(loaded, "__all__", None)
    return sorted(
        listed
        or (
            name
            for name, value in vars(loaded).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module
        )
    )
