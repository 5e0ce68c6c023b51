"""Parts that load their own state: the structure that they are given, and what they take of it."""

from __future__ import annotations

from collections import ChainMap, UserDict
from copy import deepcopy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from penstock.checkpoint.engine import LoadChoice
from penstock.checkpoint.match import StoredNames, loading_into
from penstock.checkpoint.state.regions import (
    CheckpointIndex,
    Regions,
    StoredObject,
    StoredRegions,
    TensorFacts,
)
from penstock.checkpoint.state.tensors import is_tensor
from penstock.checkpoint.state.walk import walk
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping


class Part:
    """A part whose structure depends on what it has done."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def stored(state: Mapping[str, Any], *, converts: bool = False, exclude: str | None = None) -> StoredNames:
    """The names that a checkpoint of this state has."""
    leaves, _ = walk(state, is_tensor)
    tensors = tuple(
        TensorFacts(leaf.name, str(leaf.value.dtype)[6:], tuple(leaf.value.shape), leaf.value.itemsize)
        for leaf in leaves
        if is_tensor(leaf.value)
    )
    objects = tuple(StoredObject(leaf.name, 0, 0, 0) for leaf in leaves if not is_tensor(leaf.value))
    none = np.zeros(0, dtype=np.int64)
    regions = StoredRegions(Regions.from_rows(()), none, none, none, none, none.astype(np.bool_))
    paths = {leaf.name: leaf.path for leaf in leaves}
    choice = LoadChoice(convert_dtypes=converts, exclude=exclude)
    values = {leaf.name: leaf.value for leaf in leaves}
    index = CheckpointIndex(tensors, regions, objects, (), paths)
    return StoredNames(index, choice, read=lambda one: values[one.name])


def load(
    state: dict[str, Any], saved: Mapping[str, Any], *, converts: bool = False, exclude: str | None = None
) -> None:
    """Load as the loader does, by names and places alone."""
    values = {leaf.name: leaf.value for leaf in walk(saved, is_tensor)[0]}
    names = stored(saved, converts=converts, exclude=exclude)
    with loading_into(state, names) as parts:
        for leaf in walk(parts.state, is_tensor)[0]:
            if names.asked(leaf.name) is None:
                continue
            if is_tensor(leaf.value):
                leaf.value.copy_(values[leaf.name])
            else:
                leaf.put(values[leaf.name])
        parts.check()
        parts.take()


def test_part_and_plain_value_are_loaded() -> None:
    part = Part({"x": 1})
    state = {"part": part, "step": 1}
    load(state, {"part": {"x": 5}, "step": 2})
    assert part.state == {"x": 5}
    assert state == {"part": part, "step": 2}


def test_no_part_is_loaded_after_a_failure() -> None:
    part = Part({"x": [1]})
    saved = {"part": {"x": [1]}}
    with pytest.raises(UsageError), loading_into({"part": part}, stored(saved)):
        raise UsageError("no")
    assert part.state == {"x": [1]}


@pytest.mark.parametrize(
    ("fresh", "saved"),
    [
        ({}, {"position": 4}),
        ({"iterator": None}, {"iterator": {"position": 4, "seen": torch.ones(3)}}),
        ({"iterator": {"position": 0}}, {"iterator": None}),
        ({"iterator": {"order": torch.zeros(2)}}, {"iterator": {"order": torch.ones(5)}}),
        ({"iterator": torch.zeros(2)}, {"iterator": None}),
        ({"workers": []}, {"workers": [{"at": 1}, {"at": 2}]}),
        ({"workers": {}}, {"workers": {0: {"at": 1}, 1: {"at": 2}}}),
        ({"workers": {"0": {"at": 0}}}, {"workers": {"0": {"at": 1}, "1": {"at": 2}}}),
        ({"seen": []}, {"seen": [torch.ones(3), {"at": 1}]}),
        ({"seen": [torch.ones(2), torch.ones(2), torch.ones(2)]}, {"seen": [torch.zeros(1)]}),
        ({"workers": {0: {"at": 9}, 1: {"at": 9}, 5: {"at": 9}}}, {"workers": {0: {"at": 1}}}),
        ({"workers": {"0": {"at": 9}, "1": {"at": 9}}}, {"workers": {"0": {"at": 1}}}),
    ],
    ids=[
        "new",
        "begun",
        "ended",
        "longer",
        "gone",
        "list",
        "counted",
        "named",
        "filled",
        "shorter",
        "fewer-counted",
        "fewer-named",
    ],
)
def test_part_gets_the_structure_that_was_saved(fresh: dict[str, Any], saved: dict[str, Any]) -> None:
    part = Part(fresh)
    load({"part": part}, {"part": saved})
    assert in_order(part.state) == in_order(saved)


def test_values_of_ranks_that_are_gone_or_new_are_known_by_name(caplog: pytest.LogCaptureFixture) -> None:
    names = stored(
        {"part": {"x": 1}, "part.x@rank1": 2, "part.x@rank3": 4, "other.x@rank3": 4, "seed@rank3": 1}
    )
    with loading_into({"part": Part({}), "seed": 0}, names) as parts:
        assert parts.of_other_ranks(2) == ["part.x@rank3", "seed@rank3"]
        assert parts.of_other_ranks(4) == []
        parts.warn_of_other_ranks(4, 4)
        assert not caplog.records
        parts.warn_of_other_ranks(4, 5)
    assert "Saved by 4 ranks: ranks from 4 onward get rank 0's values of part.x, seed," in caplog.text


@pytest.mark.parametrize("kind", [UserDict, ChainMap])
def test_values_are_put_into_any_mapping_that_can_change(kind: type[MutableMapping[str, Any]]) -> None:
    state = kind({"n": None})  # type: ignore[call-arg]
    load(state, {"n": 3})  # type: ignore[arg-type]
    assert state["n"] == 3


def test_mapping_that_cannot_change_is_refused_before_anything_is_loaded() -> None:
    part = Part({"x": 1})
    with pytest.raises(UsageError, match="is a mappingproxy, in which n cannot be replaced"):
        load(MappingProxyType({"part": part, "n": 0}), {"part": {"x": 2}, "n": 3})  # type: ignore[arg-type]
    assert part.state == {"x": 1}


def in_order(value: Any) -> str:
    """Values without the order of keys, which a checkpoint does not have."""
    if not isinstance(value, dict):
        return repr(value)
    return repr(sorted((repr(key), in_order(inner)) for key, inner in value.items()))


def trained(*, names: bool = False, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    given: Any = module.named_parameters() if names else module.parameters()
    optimizer = torch.optim.AdamW(given, lr=0.1)
    module(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return module, optimizer


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    return module, torch.optim.AdamW(module.parameters())


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    found, expected = one.state_dict(), other.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, slots in expected["state"].items():
        assert slots.keys() == found["state"][number].keys()
        assert all(torch.equal(slots[slot], found["state"][number][slot]) for slot in slots)


class Momentum(torch.optim.Optimizer):
    """Keeps its state in types of its own, next to parameters of any other."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["m"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["inner"] = {"n": torch.zeros(2, dtype=torch.int32)}
                    state["exact"] = torch.zeros(parameter.shape, dtype=torch.float64)
                state["m"].mul_(0.9).add_(parameter.grad.bfloat16())
                state["inner"]["n"] += 1
                state["exact"] += parameter.grad.double() / 3
                parameter.sub_(group["lr"] * (state["m"].double() + state["exact"]).to(parameter.dtype))


class Wrapper(torch.optim.Optimizer):
    """As trainers wrap an optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattribute__(self, name: str) -> Any:
        inner = object.__getattribute__(self, "inner")
        return inner if name == "inner" else getattr(inner, name)


class Overriding(Momentum):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(dict(state_dict))


class Container:
    """A part of its own around an optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.zero_grad, self.step, self.inner = inner.zero_grad, inner.step, inner

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def contained(given: Any) -> Container:
    return Container(Momentum(given))


@pytest.mark.parametrize("make", [Momentum, Overriding, contained, lambda given: Wrapper(Momentum(given))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_keep_their_types_and_losses_after_a_restart_are_the_same(
    make: Any, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    def begin() -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = torch.nn.Linear(8, 4, dtype=dtype)
        return module, make(module.parameters())

    def train(module: Any, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.zero_grad()
            loss = module(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    module, optimizer = begin()
    train(module, optimizer, range(3))
    saved = deepcopy({"model": module.state_dict(), "optim": optimizer.state_dict()})
    expected = train(module, optimizer, range(3, 8))
    module, optimizer = begin()
    policy = "_process_value_according_to_param_policy"
    usual = torch.optim.Optimizer.__dict__[policy]
    load({"model": module, "optim": optimizer}, saved)
    assert torch.optim.Optimizer.__dict__[policy] is usual  # replaced for the load alone
    found = optimizer.state_dict()["state"]
    for number, slots in saved["optim"]["state"].items():
        assert found[number]["m"].dtype == torch.bfloat16
        assert found[number]["inner"]["n"].dtype == torch.int32
        assert torch.equal(found[number]["exact"], slots["exact"])
    assert train(module, optimizer, range(3, 8)) == expected
    assert not caplog.records


def test_what_an_optimizer_converts_as_it_loads_is_told(caplog: pytest.LogCaptureFixture) -> None:
    module, other = (torch.nn.Linear(2, 2) for _ in range(2))
    optimizer, fresh = (Momentum(each.parameters()) for each in (module, other))
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    def convert(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {
            number: {**slots, "inner": {"n": slots["inner"]["n"].long()}}
            for number, slots in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    fresh.register_load_state_dict_pre_hook(convert)
    load({"optim": fresh}, {"optim": optimizer.state_dict()})
    assert fresh.state[other.weight]["inner"]["n"].dtype == torch.int64
    assert "'optim' has converted what it loaded: state.0.inner.n from torch.int32 to" in caplog.text


def test_floats_get_the_type_of_their_parameter_where_a_load_converts() -> None:
    module, other = torch.nn.Linear(2, 2).double(), torch.nn.Linear(2, 2)
    optimizer, fresh = (Momentum(each.parameters()) for each in (module, other))
    module(torch.ones(1, 2).double()).sum().backward()
    optimizer.step()
    load({"optim": fresh}, {"optim": optimizer.state_dict()}, converts=True)
    slots = fresh.state[other.weight]
    assert [slots["m"].dtype, slots["inner"]["n"].dtype] == [torch.float32, torch.int32]
    # The program's own calls do as ever.
    fresh.load_state_dict(optimizer.state_dict())
    assert slots is not fresh.state[other.weight]
    assert fresh.state[other.weight]["inner"]["n"].dtype == torch.float32


def test_optimizer_without_state_gets_all_of_it() -> None:
    module, optimizer = trained()
    again, other = fresh()
    before = [parameter.clone() for parameter in again.parameters()]
    saved = {"optim": optimizer.state_dict()}
    load({"optim": other}, saved)
    assert_same_state(other, optimizer)
    assert all(parameter.grad is None for parameter in again.parameters())
    assert all(torch.equal(*pair) for pair in zip(before, again.parameters(), strict=True))
    assert module is not again


def test_optimizer_takes_options_and_slots_that_it_was_not_made_with() -> None:
    module, _ = trained()
    optimizer = torch.optim.AdamW(module.parameters(), amsgrad=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    module(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    _, other = fresh()
    load({"optim": other}, {"optim": optimizer.state_dict()})
    assert_same_state(other, optimizer)


def test_optimizer_that_was_saved_before_its_first_step_has_no_state() -> None:
    _, optimizer = fresh()
    _, other = trained()
    load({"optim": other}, {"optim": optimizer.state_dict()})
    assert not other.state_dict()["state"]


def test_parameter_without_saved_state_is_named(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer = trained()
    saved = optimizer.state_dict()
    del saved["state"][2]
    _, other = fresh()
    load({"optim": other}, {"optim": saved})
    assert sorted(other.state_dict()["state"]) == [0, 1, 3]
    assert "has no state for the parameters 2 of 'optim'" in caplog.text


def test_groups_of_other_parameters_are_refused() -> None:
    module, optimizer = trained()
    named: dict[str, Any] = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    named["param_groups"][0]["params"] = ["0.weight", "0.bias", "1.weight", "other"]
    with pytest.raises(UsageError, match="Group 0 of 'optim' has different parameters"):
        load({"model": module, "optim": optimizer}, {"model": module.state_dict(), "optim": named})


def test_optimizer_of_named_parameters_needs_no_module_to_load_names() -> None:
    _, optimizer = trained(names=True)
    saved = optimizer.state_dict()
    names = saved["param_groups"][0]["param_names"]
    named = {
        "state": {names[number]: slots for number, slots in saved["state"].items()},
        "param_groups": [{**saved["param_groups"][0], "params": names}],
    }
    _, other = trained(names=True, seed=1)
    load({"optim": other}, {"optim": named})
    assert_same_state(other, optimizer)


@pytest.mark.parametrize("is_named", [False, True])
def test_parameters_in_another_order_than_when_they_were_saved_are_refused(*, is_named: bool) -> None:
    # Names tell what shapes do not: both biases have one element.
    module = torch.nn.ParameterDict({"a": torch.ones(1), "b": torch.ones(1) if is_named else torch.ones(2)})
    given: list[Any] = list(module.named_parameters()) if is_named else list(module.parameters())
    optimizer, other = torch.optim.AdamW(given), torch.optim.AdamW(given[::-1])
    (module["a"].sum() + module["b"].sum()).backward()
    optimizer.step()
    match = "'a' was where 'b' is" if is_named else r"'state\.0\.exp_avg' is \[1\] in .* parameter 0 is \[2\]"
    with pytest.raises(UsageError, match=match):
        load({"optim": other}, {"optim": optimizer.state_dict()})


def with_moments(*names: str, is_named: bool = True) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module of parameters a and b, whose moments are 1 and 2, and its optimizer in this order."""
    module = torch.nn.ParameterDict({"a": torch.ones(1), "b": torch.ones(1)})
    parameters = dict(module.named_parameters())
    for name, moment in {"a": 1.0, "b": 2.0}.items():
        parameters[name].grad = torch.full((1,), moment)
    given: Any = [(name, parameters[name]) if is_named else parameters[name] for name in names]
    optimizer = torch.optim.SGD(given, momentum=1)
    optimizer.step()
    return module, optimizer


def by_name(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(module, optimizer)


@pytest.mark.parametrize("is_named", [False, True])
def test_names_in_a_group_stay_those_of_its_own_parameters(*, is_named: bool) -> None:
    module, optimizer = with_moments("b", "a", is_named=is_named)
    weights = module.state_dict()
    load({"model": module, "optim": optimizer}, {"model": weights, "optim": by_name(*with_moments("a", "b"))})
    moments = {
        name: optimizer.state[each]["momentum_buffer"].item() for name, each in module.named_parameters()
    }
    assert moments == {"a": 1, "b": 2}
    assert optimizer.param_groups[0]["param_names"] == ["b", "a"]
    again = with_moments("a", "b", is_named=is_named)
    with pytest.raises(UsageError, match="'b' was where 'a' is"):
        load({"model": again[0], "optim": again[1]}, {"model": weights, "optim": optimizer.state_dict()})


def test_optimizer_that_a_wrapper_named_takes_the_names_of_its_module() -> None:
    module, optimizer = with_moments("a", "b")
    again, _ = with_moments("a", "b")
    fresh = torch.optim.SGD([(f"module.{name}", each) for name, each in again.named_parameters()], momentum=1)
    load(
        {"model": again, "optim": fresh}, {"model": module.state_dict(), "optim": by_name(module, optimizer)}
    )
    assert [fresh.state[each]["momentum_buffer"].item() for each in again.parameters()] == [1, 2]
    assert fresh.param_groups[0]["param_names"] == ["module.a", "module.b"]


def with_names(optimizer: torch.optim.Optimizer, *names: str) -> dict[str, Any]:
    """The state of an optimizer that was made from parameters of these names."""
    saved = optimizer.state_dict()
    return saved | {"param_groups": [saved["param_groups"][0] | {"param_names": list(names)}]}


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_names_that_only_wrappers_of_the_module_change_are_those_of_the_same_parameters(
    wrapper: str, *, is_wrapped: bool
) -> None:
    bare, wrapped = ("a", "b"), (f"{wrapper}a", f"{wrapper}b")
    was, now = (bare, wrapped) if is_wrapped else (wrapped, bare)
    _, optimizer = with_moments("a", "b")
    again, _ = with_moments("a", "b")

    def fresh(*names: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(zip(names, again.parameters(), strict=True), momentum=1)

    loaded = fresh(*now)
    load({"optim": loaded}, {"optim": with_names(optimizer, *was)})
    assert [loaded.state[each]["momentum_buffer"].item() for each in again.parameters()] == [1, 2]
    assert loaded.param_groups[0]["param_names"] == [*now]
    with pytest.raises(UsageError, match="'a' was where 'b' is"):
        load({"optim": fresh(*now[::-1])}, {"optim": with_names(optimizer, *was)})
    with pytest.raises(UsageError, match="'b' is where 'c' was"):
        load({"optim": loaded}, {"optim": with_names(optimizer, was[0], was[1].replace("b", "c"))})
    with pytest.raises(UsageError, match="'a' was where 'b' is"):
        load({"optim": by_name(*with_moments("b", "a"))}, {"optim": with_names(optimizer, *was)})


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_submodule_with_the_name_of_a_wrapper_tells_parameters_apart(num_groups: int) -> None:
    module = torch.nn.ParameterDict({"w": torch.ones(1), "of": torch.ones(1)})
    pairs = list(zip(("w", "module.w"), module.parameters(), strict=True))

    def make(pairs: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [pair]} for pair in pairs] if num_groups == 2 else pairs)

    saved = make(pairs)
    (module["w"].sum() + module["of"].sum()).backward()
    saved.step()
    with pytest.raises(UsageError, match=r"'w' was where 'module\.w' is"):
        load({"optim": make(pairs[::-1])}, {"optim": saved.state_dict()})


def test_names_of_another_order_than_the_numbers_of_a_checkpoint_are_refused() -> None:
    with pytest.raises(UsageError, match="'a' was where 'b' is"):
        load({"optim": by_name(*with_moments("b", "a"))}, {"optim": with_moments("a", "b")[1].state_dict()})


@pytest.mark.parametrize("num_groups", [1, 2])
def test_numbers_of_a_checkpoint_are_in_the_order_of_the_groups_not_of_the_names(num_groups: int) -> None:
    # As text, "10.weight" is before "2.weight". As all shapes are equal, only moments tell which is which.
    module = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(12)))
    parameters = list(module.parameters())
    groups = [{"params": parameters[place::num_groups]} for place in reversed(range(num_groups))]
    optimizer, other = torch.optim.SGD(groups, momentum=1), torch.optim.SGD(groups, momentum=1)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    optimizer.zero_grad()  # torch's helper creates no state for parameters with gradients
    named = by_name(module, other)
    load({"optim": named}, {"optim": optimizer.state_dict()})
    moments = {name: slots["momentum_buffer"].item() for name, slots in named["state"].items()}
    assert moments == {f"{number}.weight": number for number in range(12)}
    assert named["param_groups"] == by_name(module, optimizer)["param_groups"]


def of_digits(*order: str, names: tuple[str, ...], num_groups: int = 1) -> tuple[Any, Any]:
    """A module whose parameters have these names, and moments that are their places among the names."""
    module = torch.nn.Module()
    for place, name in enumerate(names):
        module.register_parameter(name, torch.nn.Parameter(torch.ones(1)))
        module.get_parameter(name).grad = torch.full((1,), place + 1.0)
    parts = [order] if num_groups == 1 else [order[:1], order[1:]]
    optimizer = torch.optim.SGD(
        [{"params": [module.get_parameter(name) for name in part]} for part in parts], momentum=1
    )
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def moments_by_name(module: Any, optimizer: Any) -> dict[str, float]:
    state = by_name(module, optimizer)["state"]
    return {name: slots["momentum_buffer"].item() for name, slots in state.items()}


@pytest.mark.parametrize("names", [("0", "1", "2"), ("1", "w", "0"), ("0", "1", "state"), ("1", "2", "5")])
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_names_that_are_digits_are_not_taken_for_numbers_of_an_optimizer_nor_numbers_for_names(
    names: tuple[str, ...], num_groups: int, size: int
) -> None:
    order = names[::-1][:size]

    def make(*order: str) -> tuple[Any, Any]:
        return of_digits(*order, names=names, num_groups=num_groups)

    module, optimizer = make(*order)
    expected = moments_by_name(module, optimizer)
    weights = module.state_dict()
    for saved in (by_name(module, optimizer), optimizer.state_dict()):
        again, fresh = make(*order)
        fresh.state.clear()
        load({"model": again, "optim": fresh}, {"model": weights, "optim": saved})
        assert moments_by_name(again, fresh) == expected
        named = by_name(*make(*order))
        for slots in named["state"].values():
            slots["momentum_buffer"].zero_()
        load({"optim": named}, {"optim": deepcopy(saved)})
        assert {name: slots["momentum_buffer"].item() for name, slots in named["state"].items()} == expected
    # Names find their parameters in whatever order an optimizer has them.
    if num_groups == 1:
        again, fresh = make(*order[::-1])
        load({"model": again, "optim": fresh}, {"model": weights, "optim": by_name(module, optimizer)})
        assert moments_by_name(again, fresh) == expected


@pytest.mark.parametrize("knows_names", [False, True])
def test_whose_state_a_digit_names_is_known_from_the_saved_groups_or_an_error(*, knows_names: bool) -> None:
    module, optimizer = of_digits("1", "0", names=("0", "1"))
    saved = {"model": module.state_dict(), "optim": by_name(module, optimizer)}
    again, fresh = of_digits("1", "0", names=("0", "1"))
    state = {"model": again, "optim": fresh} if knows_names else {"optim": fresh}
    excluded = "optim.param_groups.*"
    if not knows_names:
        with pytest.raises(UsageError, match="Group 0 of 'optim' has different parameters"):
            load(state, saved)
        fresh.state.clear()
        load(state, saved, exclude=excluded)
        assert not fresh.state
        return
    fresh.state.clear()
    load(state, saved, exclude=excluded)
    assert moments_by_name(again, fresh) == moments_by_name(module, optimizer)
    del saved["optim"]["param_groups"]
    with pytest.raises(UsageError, match="0, 1 in the state of 'optim' may be names or numbers"):
        load(state, saved, exclude=excluded)


def test_numbers_of_an_optimizer_are_not_given_to_other_names_that_are_digits() -> None:
    named = by_name(*of_digits("1", "0", names=("0", "1")))
    own = by_name(*of_digits("a", "b", names=("a", "b")))
    with pytest.raises(UsageError, match="The groups of 'optim' have different parameters"):
        load({"optim": own}, {"optim": named})


def test_own_entry_of_an_optimizer_with_the_name_of_a_parameter_stays_its_own() -> None:
    module, optimizer = with_moments("a", "b", is_named=False)
    again, fresh = with_moments("a", "b", is_named=False)
    weight = again.get_parameter("a")
    for each in (optimizer, fresh):
        each.state["a"] = {"count": 5}  # type: ignore[index]
    load({"model": again, "optim": fresh}, {"model": module.state_dict(), "optim": optimizer.state_dict()})
    assert fresh.state["a"] == {"count": 5}  # type: ignore[index]
    assert fresh.state[weight]["momentum_buffer"].item() == 1


@pytest.mark.parametrize("is_named", [False, True])
def test_parameters_in_another_group_than_when_they_were_saved_are_refused(*, is_named: bool) -> None:
    module: Any = torch.nn.ParameterDict({"a": torch.ones(1), "b": torch.ones(1)})
    pairs = list(module.named_parameters())
    saved = torch.optim.AdamW([{"params": [pair]} for pair in pairs])
    (module["a"].sum() + module["b"].sum()).backward()
    saved.step()
    other = torch.optim.AdamW([{"params": [pair if is_named else pair[1]]} for pair in pairs[::-1]])
    state = {"model": module, "optim": other}
    with pytest.raises(UsageError, match="'a' was where 'b' is"):
        load(state, {"model": module.state_dict(), "optim": saved.state_dict()})


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.SGD, torch.optim.Rprop])
def test_states_of_other_shapes_than_parameters_are_in_order(kind: Any) -> None:
    shapes = [(4, 1), (1, 4), (4, 4), (4,), (1,), (), (2, 3, 4)]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer, other = kind(parameters), kind([each.detach().clone() for each in parameters])
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    load({"optim": other}, {"optim": optimizer.state_dict()})
    assert other.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
