"""runs.yaml: what it may contain, and the errors for anything else."""

import pytest

from penstock.errors import UsageError
from penstock.trace.compare.trace_study import ComparisonSpec, parse_document

GOOD = """
runs: {a: a/*.pfw.gz, b: [b/1.pfw, b/2.pfw]}
baseline: b
tiers: {ssd: /l/ssd, pfs: [/p/one, /p/two]}
file_classes: {weights: "^layer-"}
phases: ["flush=name~flush"]
device_rates: {ssd: 2.5GB/s}
"""


def read(text: str) -> ComparisonSpec:
    return parse_document(ComparisonSpec, text, source="runs.yaml")


def test_a_description_becomes_a_lens_in_which_own_phases_come_first() -> None:
    asked = read(GOOD)
    dimensions = asked.dimensions()
    assert dimensions.tiers == {"ssd": ("/l/ssd",), "pfs": ("/p/one", "/p/two")}
    assert dimensions.phases[0][0] == "flush"
    assert asked.baseline_run == "b"
    assert asked.device_rates == {"ssd": 2.5e9}


def test_the_first_run_is_the_baseline_unless_one_is_named() -> None:
    assert read("runs: {x: '*.pfw', y: z.pfw}").baseline_run == "x"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("baseline: b", "baseline: c", "not one of the runs a, b"),
        ("tiers:", "tires:", "unknown key tires: did you mean tiers?"),
        ("device_rates: {ssd", "device_rates: {disk", "not one of the tiers ssd, pfs"),
        ("2.5GB/s", "fast", "is not a rate"),
        ("^layer-", "(", "not a regular expression"),
        ("flush=name~flush", "flush", "not a phase rule"),
        ("runs: {a: a/*.pfw.gz, b: [b/1.pfw, b/2.pfw]}\nbaseline: b", "runs: {}", "runs is {}"),
        ("runs:", "tiers2:", "runs is missing"),
    ],
)
def test_an_error_in_runs_yaml_names_the_key_and_its_place(old: str, new: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(GOOD.replace(old, new))
    assert said in str(refused.value)
    assert "runs.yaml" in str(refused.value)


def test_empty_description_is_told_to_be_one_of_runs() -> None:
    with pytest.raises(UsageError, match=r"A description of runs is .*, not None.*penstock docs trace"):
        parse_document(ComparisonSpec, "", source="runs.yaml")
