"""YAML text: plain values, and a clear word about what is none."""

import pytest

from penstock.errors import UsageError
from penstock.workload.strict_yaml import parse_yaml


def test_plain_values_come_out() -> None:
    assert parse_yaml("a: {b: 1, c: [x, 2.5]}\nd: off\n", source="f") == {
        "a": {"b": 1, "c": ["x", 2.5]},
        "d": False,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "the key 'a' is given twice (f.yaml, line 3)"),
        ("a: {b: 1, b: 2}\n", "the key 'b' is given twice (f.yaml, line 1)"),
        ("a: [1\n", "Not YAML"),
        ("a: !!python/object:os.system 1\n", "Not YAML"),
        ("- 1\n", "A workload is a mapping of sections, not [1] (f.yaml)"),
        ("", "not None"),
        ("[a, b]: 1\n", "found unhashable key (f.yaml, line 1)"),
        ("a: \x01\n", "Not YAML: unacceptable character #x0001"),
        ("a: 1" + ":1" * 20_000, "Not YAML: line 1 has a number of 40,001 digits (f.yaml)"),
        ("b: 1\na: 0x" + "f" * 5000, "Not YAML: line 2 has a number of 5,002 digits (f.yaml)"),
        ("a: 1" + ":1" * 300 + ".0", "is not a valid float (f.yaml)"),
        ('a: !!int ""', "Not YAML: line 1: '' is not a valid int (f.yaml)"),
        ('a: !!float ""', "'' is not a valid float"),
        ("a: !!bool x", "'x' is not a valid bool"),
        ("a: !!timestamp x", "'x' is not a valid timestamp"),
        ("a: !!int [1]", "Not YAML"),
        ("[" * 100_000, "nested too deeply (f.yaml)"),
        ("- " * 50_000, "nested too deeply (f.yaml)"),
        ("".join(f"{' ' * level}a:\n" for level in range(3000)), "nested too deeply (f.yaml)"),
    ],
)
def test_what_is_no_mapping_or_hides_a_value_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_yaml(text, source="f.yaml")
    assert said in str(caught.value)
