"""Layers of settings: the later one wins, and every value knows where it was asked for."""

import pytest

from penstock.errors import UsageError
from penstock.workload.settings import LayeredSettings, dotted, flatten


def stack_of(*layers: dict[tuple[str, ...], object]) -> LayeredSettings:
    stack = LayeredSettings()
    for number, values in enumerate(layers):
        stack.add_layer(values, source=f"layer {number}")
    return stack


def test_leaves_come_with_their_path_and_lists_are_leaves() -> None:
    tree = {"a": {"b": 1, "c": [1, {"d": 2}], "e": {}}, "f": None}
    assert list(flatten(tree)) == [(("a", "b"), 1), (("a", "c"), [1, {"d": 2}]), (("f",), None)]


def test_a_path_is_written_with_dots() -> None:
    assert dotted(("dataset", "format")) == "dataset.format"


def test_the_later_layer_wins_and_the_rest_stays() -> None:
    stack = stack_of({("a", "b"): 1, ("a", "c"): 2}, {("a", "b"): 3})
    assert stack.tree() == {"a": {"b": 3, "c": 2}}
    assert stack.source_of(("a", "b")) == "layer 1"
    assert stack.source_of(("a", "c")) == "layer 0"


def test_a_value_replaces_everything_below_its_path() -> None:
    stack = stack_of({("t", "x_time", "mean"): 1, ("t", "x_time", "stdev"): 2}, {("t", "x_time"): 5})
    assert stack.tree() == {"t": {"x_time": 5}}


@pytest.mark.parametrize("order", [0, 1])
def test_a_spread_beside_a_bare_time_makes_it_a_distribution(order: int) -> None:
    layers: list[dict[tuple[str, ...], object]] = [{("t", "x_time"): 0.5, ("t", "x_time", "stdev"): 0.1}]
    if order:
        layers = [{("t", "x_time"): 0.5}, {("t", "x_time", "stdev"): 0.1}]
    assert stack_of(*layers).tree() == {"t": {"x_time": {"mean": 0.5, "stdev": 0.1}}}


def test_a_null_makes_room_for_parts() -> None:
    assert stack_of({("m", "t"): None}, {("m", "t", "x"): 1}).tree() == {"m": {"t": {"x": 1}}}


def test_a_plain_value_has_no_parts_and_the_error_says_whose_it_was() -> None:
    with pytest.raises(UsageError) as caught:
        stack_of({("a", "b"): 1}, {("a", "b", "c"): 2})
    assert "a.b.c cannot be set: a.b is 1" in str(caught.value)
    assert "layer 1" in str(caught.value)


def test_the_source_of_a_section_is_that_of_a_value_in_it() -> None:
    stack = stack_of({("a", "b", "c"): 1})
    assert stack.source_of(("a", "b")) == "layer 0"
    assert stack.source_of(("a", "b", "c", "3", "name")) == "layer 0"
    assert stack.source_of(("z",)) == ""
