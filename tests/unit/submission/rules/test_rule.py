"""Declarations of rules: what they must say, and what becomes of value, limit, proof and verdict."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.submission.timed_tree import valid_training
from tests.support.submission.tree_store import TreeStore

import penstock.submission.rules
from penstock.errors import UsageError
from penstock.submission.edition import load_edition
from penstock.submission.finding import Finding, Verdict, not_checked
from penstock.submission.parsed_file import MissingFact
from penstock.submission.rules import MODULES, RULES, rule_by_id
from penstock.submission.rules import rule as rule_module
from penstock.submission.rules.rule import ALL, ResultCase, RunCase, limit_rule, result_rule, run_rule
from penstock.submission.tree_layout import Benchmark

ABOUT: dict[str, Any] = {
    "id": "test.rule",
    "title": "title",
    "editions": ALL,
    "source": "source",
    "formula": "formula",
    "passes": "passes",
    "fails": "fails",
}


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that are declared here are forgotten afterwards."""
    monkeypatch.setattr(rule_module, "_registry", {})


def nothing(_: ResultCase) -> Iterator[Finding]:
    yield from ()


@pytest.mark.parametrize("key", ["title", "editions", "source", "formula", "passes", "fails"])
def test_a_rule_that_says_too_little_fails_where_it_is_declared(key: str) -> None:
    with pytest.raises(TypeError, match=rf"Rule 'test\.rule' lacks {key}\. Add it to the declaration\."):
        result_rule(**{name: text for name, text in ABOUT.items() if name != key})(nothing)


def test_a_rule_without_any_edition_fails() -> None:
    with pytest.raises(TypeError, match=r"Rule 'test\.rule' lacks editions"):
        result_rule(**ABOUT | {"editions": ()})(nothing)


def test_a_rule_of_an_unknown_edition_fails() -> None:
    with pytest.raises(
        ValueError, match=r"Rule 'test\.rule' names unknown editions v9\. Known: v1\.0, v2\.0"
    ):
        result_rule(**ABOUT | {"editions": ("v1.0", "v9")})(nothing)


def test_an_id_is_given_once() -> None:
    result_rule(**ABOUT)(nothing)
    with pytest.raises(ValueError, match=r"Rule 'test\.rule' is declared twice"):
        result_rule(**ABOUT)(nothing)


def test_a_rule_is_about_training_unless_it_says_otherwise() -> None:
    assert result_rule(**ABOUT)(nothing).benchmarks == (Benchmark.TRAINING,)
    other = ABOUT | {"id": "test.other", "benchmarks": (Benchmark.KV_CACHE,)}
    assert result_rule(**other)(nothing).benchmarks == (Benchmark.KV_CACHE,)


def test_every_module_of_rules_is_imported_in_the_order_of_the_findings() -> None:
    folder = Path(penstock.submission.rules.__file__).parent
    assert sorted(MODULES) == sorted(path.stem for path in folder.glob("*_rules.py"))
    assert [rule.id for rule in RULES[:3]] == ["scope.benchmark", "structure.names", "structure.divisions"]
    assert RULES[-1].id == "order.once"
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_an_unknown_rule_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"There is no rule 'sizing'\. Rules are: .*sizing\.steps"):
        rule_by_id("sizing")


@pytest.mark.parametrize(
    ("compare", "value", "verdict", "sign"),
    [
        ("==", 7, Verdict.PASS, "=="),
        ("==", 8, Verdict.FAIL, "!="),
        ("<=", 7, Verdict.PASS, "<="),
        ("<=", 8, Verdict.FAIL, ">"),
        (">=", 7, Verdict.PASS, ">="),
        (">=", 6, Verdict.FAIL, "<"),
        (">", 8, Verdict.PASS, ">"),
        (">", 7, Verdict.FAIL, "<="),
    ],
)
def test_a_limit_rule_compares_and_proves(
    compare: Any, value: int, verdict: Verdict, sign: str, store: TreeStore
) -> None:
    rule = limit_rule(
        ResultCase,
        **ABOUT,
        value=lambda _: value,
        compare=compare,
        limit=lambda case: len(case.result.runs) + 1,
        evidence=lambda case: case.name,
        show=("{} a", "{} b"),
        proof="{value} {sign} {limit}",
        fix="make it {limit}",
    )
    (finding,) = store.findings(valid_training(), rule)
    assert finding == Finding(
        verdict=verdict,
        evidence="closed/acme/results/fast/training/unet3d",
        value=f"{value} a",
        limit="7 b",
        proof=f"{value} {sign} 7",
        fix="" if verdict is Verdict.PASS else "make it 7",
        rule="test.rule",
    )


def test_a_limit_rule_of_runs_excuses_a_warm_up_and_may_not_apply(store: TreeStore) -> None:
    rule = limit_rule(
        RunCase,
        **ABOUT,
        not_applicable_if=lambda case: "second" if case.name.endswith("102000") else "",
        value=lambda case: len(case.result.runs),
        compare="==",
        limit=0,
        evidence=lambda case: case.run.summary.file,
        proof=lambda case, value, limit: f"{case.edition.edition}: {value}, {limit}",
        fix="-",
        otherwise=lambda value, limit: Verdict.FAIL if value > limit else Verdict.WARNING,
        lenient_in_warm_up=True,
    )
    first, second, third = store.findings(valid_training(num_runs=3), rule)
    assert (first.verdict, first.proof) == (Verdict.WARNING, "v3.0: 3, 0 (in the warm-up)")
    assert (second.verdict, second.proof) == (Verdict.NOT_APPLICABLE, "second")
    assert (third.verdict, third.proof) == (Verdict.FAIL, "v3.0: 3, 0")


def test_a_fact_that_one_run_lacks_hides_nothing_about_the_others(store: TreeStore) -> None:
    @run_rule(**ABOUT)
    def rule(case: RunCase) -> Iterator[Finding]:
        if case.is_warm_up:
            raise MissingFact("gone", where="here.json")
        yield Finding(verdict=Verdict.PASS, proof="kept")

    found = store.findings(valid_training(num_runs=3), rule)
    assert [finding.verdict for finding in found] == [Verdict.NOT_CHECKED, Verdict.PASS, Verdict.PASS]
    assert (found[0].proof, found[0].evidence) == ("gone", "here.json")
    assert found[0].fix == "Restore the file as the benchmark wrote it."


@pytest.mark.parametrize(
    ("where", "fix"),
    [
        ("closed/acme/systems/fast.JSON", "Correct the description, which people write."),
        ("fast/unet3d/run/results.json", "Write the report anew with `penstock submission report --write`."),
        ("fast/unet3d/run/20260701_104000/summary.json", "Restore the file as the benchmark wrote it."),
        ("run/20260701_104000/.mlps-code-image", "Restore the file as the benchmark wrote it."),
        ("fast/kv_cache/llama3.1-8b", "Hand in the whole folder, with all that the benchmark wrote."),
    ],
)
def test_fix_of_a_missing_fact_fits_the_file(where: str, fix: str) -> None:
    assert not_checked(MissingFact("gone", where=where)).fix == fix


def test_runs_that_are_missing_are_not_checked(store: TreeStore) -> None:
    rule = run_rule(**ABOUT)(nothing)
    tree = valid_training()
    tree.drop("/run/2026")
    (finding,) = store.findings(tree, rule)
    assert (finding.verdict, finding.proof) == (Verdict.NOT_CHECKED, "there are no runs")


def test_a_path_without_a_division_is_not_checked(store: TreeStore) -> None:
    @result_rule(**ABOUT)
    def rule(case: ResultCase) -> Iterator[Finding]:
        yield Finding(verdict=Verdict.PASS if case.is_closed else Verdict.FAIL, proof="-")

    tree = valid_training()
    assert store.verdict(tree, rule) is Verdict.PASS
    tree.division = "other"
    root = store.write(tree) / "other" / "acme"
    (result,) = penstock.submission.check.check(root, load_edition("v3.0"), rules=[rule])
    (finding,) = result.findings
    assert finding.proof == "the path does not say which division this is"
    assert finding.fix == "Keep the submitter's folder below closed/ or open/."
