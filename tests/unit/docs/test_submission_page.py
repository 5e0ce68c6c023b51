"""The commands on the page of submissions are ones that there are."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from penstock.cli.app import app
from penstock.cli.mlpstorage import parse, translate
from penstock.cli.options import Group

PAGE = Path(__file__).parents[3] / "docs" / "submission.md"


def typed() -> Iterator[list[str]]:
    """Every command of the page, as words."""
    lines = PAGE.read_text().replace("\\\n", " ").splitlines()
    for line in lines:
        text = line.removeprefix("$ ")
        if text.startswith(("penstock ", "penstock-mlpstorage ")):
            yield shlex.split(text)


OURS = [words for words in typed() if words[0] == "penstock"]
OTHERS = [words for words in typed() if words[0] != "penstock"]


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_a_command_of_the_page_is_there_with_its_options(words: list[str]) -> None:
    command: click.Command | None = app
    rest = words[1:]
    while isinstance(command, Group):
        command = command.get_command(click.Context(command), rest.pop(0))
    assert command is not None
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in rest if word.startswith("-")} <= known


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_a_line_of_mlpstorage_on_the_page_is_understood(words: list[str]) -> None:
    assert translate(parse(words[1:]), {}, lambda _: True)[0]


def test_the_page_shows_both() -> None:
    assert len(OURS) > 8
    assert len(OTHERS) == 2
