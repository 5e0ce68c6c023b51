"""No verb, option or data format is lost: `tests/golden/cli/verbs.json` lists those of version 0.1.0.

`renamed_options.json` maps an option to its new name: `{"penstock training run": {"--old": "--new"}}`.
"""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from penstock.cli.app import app
from penstock.workload.enums import DataFormat

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
WRITTEN_DOWN = json.loads((GOLDEN / "verbs.json").read_text())
RENAMED = json.loads((GOLDEN / "renamed_options.json").read_text())


def commands(command: Any, name: str) -> dict[str, Any]:
    if not hasattr(command, "list_commands"):
        return {name: command}
    context = click.Context(command)
    verbs: dict[str, Any] = {}
    for verb in command.list_commands(context):
        verbs |= commands(command.get_command(context, verb), f"{name} {verb}")
    return verbs


@pytest.fixture(scope="module")
def today() -> dict[str, Any]:
    return commands(app, "penstock")


@pytest.mark.parametrize(("verb", "expected"), WRITTEN_DOWN["verbs"].items())
def test_a_verb_keeps_its_arguments_and_options(
    verb: str, expected: dict[str, Any], today: dict[str, Any]
) -> None:
    assert verb in today
    parameters = today[verb].params
    options = {
        name
        for option in parameters
        if option.param_type_name == "option"
        for name in (*option.opts, *option.secondary_opts)
    }
    renamed = RENAMED.get(verb, {})
    assert {renamed.get(name, name) for name in expected["options"]} <= options
    assert sum(one.param_type_name == "argument" for one in parameters) >= expected["arguments"]


def test_renamed_options_are_on_the_list() -> None:
    for verb, names in RENAMED.items():
        assert set(names) <= set(WRITTEN_DOWN["verbs"][verb]["options"])


def test_no_data_format_is_lost() -> None:
    assert set(WRITTEN_DOWN["data formats"]) <= {one.value for one in DataFormat}
