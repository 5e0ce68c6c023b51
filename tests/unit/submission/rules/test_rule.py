"""Rows of rules: each is complete, and its comparison gives value, limit, proof and verdict."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.submission.timed_tree import valid_training
from tests.support.submission.tree_store import TreeStore

import penstock.submission.check
from penstock.errors import UsageError
from penstock.submission.edition import load_edition
from penstock.submission.parsed_file import MissingFact
from penstock.submission.rules import RULES, rule_by_id
from penstock.submission.rules.rule import (
    ALL,
    NAME,
    Case,
    Finding,
    Rule,
    Verdict,
    limit,
    not_checked,
    nothing,
)

ABOUT: dict[str, Any] = {
    "id": "test.rule",
    "title": "title",
    "editions": ALL,
    "source": "source",
    "formula": "formula",
    "passes": "passes",
    "fails": "fails",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_explains_itself(rule: Rule) -> None:
    assert rule_by_id(rule.id) is rule
    assert all((rule.title, rule.source, rule.formula, rule.passes, rule.fails, rule.benchmarks))
    assert rule.editions
    assert set(rule.editions) <= set(ALL)


def test_an_id_is_given_once() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
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
def test_a_limit_is_compared_and_proved(
    compare: Any, value: int, verdict: Verdict, sign: str, store: TreeStore
) -> None:
    rule = limit(
        **ABOUT,
        each="result",
        fact=lambda _: value,
        compare=compare,
        limit=lambda case: len(case.result.runs) + 1,
        at=NAME,
        show=("{fact} a", "{limit} b"),
        proof="{fact} {sign} {limit}",
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


@pytest.mark.parametrize(("name", "verdict"), [("a", Verdict.PASS), ("c", Verdict.FAIL)])
def test_a_fact_is_one_of_a_list(name: str, verdict: Verdict, store: TreeStore) -> None:
    rule = limit(
        **ABOUT,
        each="result",
        fact=lambda _: name,
        compare="in",
        limit=lambda _: ["a", "b"],
        at=NAME,
        proof="{fact} {sign} {limit}",
        fix="-",
    )
    (finding,) = store.findings(valid_training(), rule)
    assert (finding.verdict, finding.value, finding.limit) == (verdict, name, "a, b")


@pytest.mark.parametrize(("problems", "verdict"), [([], Verdict.PASS), (["a {x}", "b"], Verdict.WARNING)])
def test_nothing_may_be_wrong(problems: list[str], verdict: Verdict, store: TreeStore) -> None:
    rule = nothing(
        **ABOUT,
        each="result",
        problems=lambda _: problems,
        at=NAME,
        show=("{number} differ", "0 differ"),
        proof="fine",
        bad="these: {}",
        fix="-",
        otherwise=Verdict.WARNING,
    )
    (finding,) = store.findings(valid_training(), rule)
    assert finding.verdict is verdict
    assert (finding.value, finding.limit) == (f"{len(problems)} differ", "0 differ")
    assert finding.proof == ("these: a {x}; b" if problems else "fine")


def test_a_rule_of_runs_excuses_a_warm_up_and_may_not_apply(store: TreeStore) -> None:
    rule = limit(
        **ABOUT,
        unless=lambda case: "second" if case.name.endswith("102000") else "",
        is_lenient_in_warm_up=True,
        fact=lambda case: len(case.result.runs),
        compare="==",
        limit=0,
        at=NAME,
        proof=lambda it: f"{it.case.edition.edition}: {it.fact}, {it.limit}",
        fix="-",
        otherwise=lambda it: Verdict.FAIL if it.fact > it.limit else Verdict.WARNING,
    )
    first, second, third = store.findings(valid_training(num_runs=3), rule)
    assert (first.verdict, first.proof) == (Verdict.WARNING, "v3.0: 3, 0 (in the warm-up)")
    assert (second.verdict, second.proof) == (Verdict.NOT_APPLICABLE, "second")
    assert (third.verdict, third.proof) == (Verdict.FAIL, "v3.0: 3, 0")


def test_a_fact_that_one_run_lacks_hides_nothing_about_the_others(store: TreeStore) -> None:
    def judge(case: Case) -> Iterator[Finding]:
        if case.whole_run.is_warm_up:
            raise MissingFact("gone", where="here.json")
        yield Finding(verdict=Verdict.PASS, proof="kept")

    found = store.findings(valid_training(num_runs=3), Rule(**ABOUT, judge=judge))
    assert [finding.verdict for finding in found] == [Verdict.NOT_CHECKED, Verdict.PASS, Verdict.PASS]
    assert (found[0].proof, found[0].evidence) == ("gone", "here.json")
    assert found[0].fix == "Restore the file as the benchmark wrote it."


@pytest.mark.parametrize(
    ("where", "fix"),
    [
        ("closed/acme/systems/fast.JSON", "Correct the description, which people write."),
        (
            "fast/unet3d/run/results.json",
            "Write the report again with `penstock submission report --write`.",
        ),
        ("fast/unet3d/run/20260701_104000/summary.json", "Restore the file as the benchmark wrote it."),
        ("run/20260701_104000/.mlps-code-image", "Restore the file as the benchmark wrote it."),
        ("fast/kv_cache/llama3.1-8b", "Submit the whole folder, with every file of the benchmark."),
    ],
)
def test_fix_of_a_missing_fact_fits_the_file(where: str, fix: str) -> None:
    assert not_checked(MissingFact("gone", where=where)).fix == fix


def test_runs_that_are_missing_are_not_checked(store: TreeStore) -> None:
    tree = valid_training()
    tree.drop("/run/2026")
    (finding,) = store.findings(tree, Rule(**ABOUT, judge=lambda _: iter(())))
    assert (finding.verdict, finding.proof) == (Verdict.NOT_CHECKED, "there are no runs")


def test_a_path_without_a_division_is_not_checked(store: TreeStore) -> None:
    def judge(case: Case) -> Iterator[Finding]:
        yield Finding(verdict=Verdict.PASS if case.is_closed else Verdict.FAIL, proof="-")

    rule = Rule(**ABOUT, each="result", judge=judge)
    tree = valid_training()
    assert store.verdict(tree, rule) is Verdict.PASS
    tree.division = "other"
    root = store.write(tree) / "other" / "acme"
    (result,) = penstock.submission.check.check(root, load_edition("v3.0"), rules=[rule])
    (finding,) = result.findings
    assert finding.proof == "the path does not say which division this is"
    assert finding.fix == "Keep the submitter's folder below closed/ or open/."
