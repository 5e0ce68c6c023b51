"""`penstock checkpoint plan` as its users call it."""

import json

import pytest
from click.testing import CliRunner

from penstock.cli.app import app

WORDS = [
    *("checkpoint", "plan", "--state", "912GiB", "--nodes", "64"),
    *("--fast", "3GiB/s", "--slow", "40GiB/s", "--node-mtbf", "200d"),
]


def test_plan_names_the_best_strategy_and_its_interval() -> None:
    ended = CliRunner().invoke(app, [*WORDS, "--system-mtbf", "60d", "--json"])
    assert ended.exit_code == 0, ended.output
    document = json.loads(ended.stdout)
    assert document["best"] == "cache with xor, flushed every 10"
    protected = document["ways"][2]
    assert protected["agrees"]
    assert [failure["restored_from"] for failure in protected["failures"]] == ["xor, rebuilt", "durable"]
    again = json.loads(CliRunner().invoke(app, [*WORDS, "--system-mtbf", "60d", "--json"]).stdout)
    assert again == document, "the same seed draws the same failures"
    shown = CliRunner().invoke(app, [*WORDS, "--system-mtbf", "60d"])
    assert "Best: cache with xor, flushed every 10" in shown.stdout


def test_a_disagreement_in_shares_of_any_size_is_told_and_decides_the_best_way() -> None:
    words = [*WORDS, "--state=1GiB", "--nodes=2", "--fast=1GiB/s", "--slow=1GiB/s", "--node-mtbf=4.75s"]
    document = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    for way in document["ways"]:
        is_far = way["efficiency"] > 2 * way["simulated_efficiency"]
        assert way["agrees"] != is_far
        assert any("trust the simulation" in warning for warning in way["warnings"]) == is_far
    best = max(document["ways"], key=lambda way: way["simulated_efficiency"])
    assert document["best"] == best["name"]


def test_plan_table_warns_of_a_slow_cache() -> None:
    ended = CliRunner().invoke(app, [*WORDS, "--fast", "100MiB/s"])
    assert ended.exit_code == 0
    assert "left for training" in ended.output
    assert "the cache does not pay" in " ".join(ended.output.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--scheme", "raid"], "Invalid value 'raid'"),
        (["--fast", "0GiB/s"], "'0GiB/s' is not positive (--fast)"),
        (["--node-mtbf", "often"], "not a duration"),
        (["--state", "0"], "'0' is not positive (--state)"),
    ],
)
def test_bad_values_name_their_option(words: list[str], told: str) -> None:
    ended = CliRunner().invoke(app, [*WORDS, *words])
    assert ended.exit_code != 0
    assert told in str(ended.exception)
