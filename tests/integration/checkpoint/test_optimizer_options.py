"""Options and state of an optimizer that are tensors or containers, loaded into a fresh one as torch does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.api import load, save
from penstock.errors import UsageError


def fresh(**options: Any) -> torch.optim.SGD:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


def trained(**options: Any) -> torch.optim.SGD:
    optimizer = fresh(**options)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer


def parts_of(value: Any, path: str = "") -> dict[str, Any]:
    """Each value below `value`, and the type and the keys of each container, by its place."""
    if isinstance(value, dict):
        inner = {f"{path}.{key!r}": each for key, each in value.items()}
    elif isinstance(value, list | tuple):
        inner = {f"{path}[{number}]": each for number, each in enumerate(value)}
    else:
        return {path: value.tolist() if isinstance(value, torch.Tensor) else value, f"{path}?": type(value)}
    parts: dict[str, Any] = {f"{path}?": (type(value), len(inner))}
    for name, each in inner.items():
        parts |= parts_of(each, name)
    return parts


OPTIONS = {
    "tensor": torch.tensor(0.01),
    "dict": {"n": 1, "mean": torch.ones(2)},
    "list": [torch.zeros(2), {"k": torch.ones(1)}],
    "numbered": {3: torch.ones(1), 4: 2},
    "digits": {"1": 2, "e": {}, "n": None, "l": [], "t": (1,)},
    "empty": {},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_any_kind_comes_into_a_fresh_optimizer(tmp_path: Path, name: str) -> None:
    saved, loaded = trained(), fresh()
    saved.param_groups[0]["option"] = OPTIONS[name]
    save({"opt": saved}, tmp_path / "step")
    load({"opt": loaded}, tmp_path / "step")
    assert parts_of(loaded.state_dict()) == parts_of(saved.state_dict())


@pytest.mark.parametrize(("was", "becomes"), [(torch.tensor(0.5), 0.1), (0.5, torch.tensor(0.1))])
def test_an_option_takes_the_kind_that_was_saved(tmp_path: Path, was: Any, becomes: Any) -> None:
    saved, loaded = trained(lr=was), fresh(lr=becomes)
    save({"opt": saved}, tmp_path / "step")
    load({"opt": loaded}, tmp_path / "step")
    assert parts_of(loaded.state_dict()) == parts_of(saved.state_dict())


@pytest.mark.parametrize("own", [{}, {"global": {"k": 1}}])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_of_no_parameter_comes_back(tmp_path: Path, own: dict[str, Any], momentum: float) -> None:
    saved, loaded = trained(momentum=momentum), fresh(momentum=momentum)
    state: dict[Any, Any] = saved.state
    state["global"], state["count"] = {"k": 3, "t": torch.ones(2), "e": {}}, 7
    other: dict[Any, Any] = loaded.state
    other.update(own)
    save({"opt": saved}, tmp_path / "step")
    load({"opt": loaded}, tmp_path / "step")
    assert parts_of(loaded.state_dict()) == parts_of(saved.state_dict())


def test_what_is_excluded_of_an_option_stays(tmp_path: Path) -> None:
    saved, loaded = trained(), fresh()
    saved.param_groups[0]["option"] = {"n": 1, "m": torch.ones(2)}
    loaded.param_groups[0]["option"] = {"n": 2, "m": torch.zeros(2)}
    save({"opt": saved}, tmp_path / "step")
    load({"opt": loaded}, tmp_path / "step", exclude="opt.param_groups.0.option.n")
    assert loaded.param_groups[0]["option"]["n"] == 2
    assert loaded.param_groups[0]["option"]["m"].tolist() == [1, 1]


KINDS: list[Any] = [
    each
    for each in vars(torch.optim).values()
    if isinstance(each, type)
    and issubclass(each, torch.optim.Optimizer)
    and each is not torch.optim.Optimizer
]
SELECTIONS: list[dict[str, Any]] = [
    {},
    {"strict": False},
    {"strict": False, "exclude": "opt.param_groups.*"},
    {"only": "opt.state.*"},
    {"only": "opt.param_groups.0.lr"},
]


def of_kind(kind: Any) -> Any:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return kind([torch.nn.Parameter(torch.ones(2, 2))], **options)


def stepped(kind: Any) -> Any:
    """An optimizer after a step, with options of a scheduler and of its user."""
    optimizer = of_kind(kind)
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad = torch.ones(2, 2).to_sparse() if kind is torch.optim.SparseAdam else torch.ones(2, 2)
    optimizer.step(lambda: torch.ones(()))
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    optimizer.param_groups[0]["of the user"] = 1
    return optimizer


@pytest.mark.parametrize("saved_kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_class_with_other_options_gets_nothing(tmp_path: Path, saved_kind: Any) -> None:
    saved = stepped(saved_kind)
    save({"opt": saved, "n": 1}, tmp_path / "step")
    for number, kind in enumerate(KINDS, KINDS.index(saved_kind)):
        fresh, selection = of_kind(kind), SELECTIONS[number % len(SELECTIONS)]
        if fresh.defaults.keys() == saved.defaults.keys():
            load({"opt": fresh}, tmp_path / "step", **selection)
            continue
        with pytest.raises(UsageError, match=rf"'opt' is {kind.__name__}, and was saved from another"):
            load({"opt": fresh}, tmp_path / "step", **selection)
        assert parts_of(fresh.state_dict()) == parts_of(of_kind(kind).state_dict())
        load({"opt": fresh, "n": 0}, tmp_path / "step", exclude="opt.*")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_options_that_torch_added_later_are_not_missed(tmp_path: Path, kind: Any) -> None:
    older = {"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
    for gone in (older, {"decoupled_weight_decay", "maximize"}, {"fused"}):
        saved, fresh = stepped(kind), of_kind(kind)
        for option in gone:
            saved.param_groups[0].pop(option, None)
        save({"opt": saved}, tmp_path / "step")
        load({"opt": fresh}, tmp_path / "step", strict=False)
        assert fresh.state_dict()["state"].keys() == saved.state_dict()["state"].keys()
        # An older version of torch has fewer options than the checkpoint.
        older_fresh = of_kind(kind)
        save({"opt": stepped(kind)}, tmp_path / "step")
        for option in gone:
            older_fresh.param_groups[0].pop(option, None)
            older_fresh.defaults.pop(option, None)
        load({"opt": older_fresh}, tmp_path / "step")


def test_the_number_of_groups_counts_even_if_only_state_is_loaded(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    save({"opt": trained()}, tmp_path / "step")
    other = torch.optim.SGD([{"params": [each]} for each in weights], lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match="'opt' has 2 groups of parameters, and the checkpoint has 1"):
        load({"opt": other}, tmp_path / "step", exclude="opt.param_groups.*")


def test_options_that_the_class_sets_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save({"opt": stepped(torch.optim.Adam)}, tmp_path / "step")
    load({"opt": of_kind(torch.optim.AdamW)}, tmp_path / "step")
    told = "'opt' has converted what it loaded: param_groups.0.decoupled_weight_decay from False to True"
    assert [record.message for record in caplog.records] == [told]
    caplog.clear()
    save({"opt": stepped(torch.optim.AdamW)}, tmp_path / "step")
    loaded = of_kind(torch.optim.Adam)
    load({"opt": loaded}, tmp_path / "step")
    assert loaded.param_groups[0]["decoupled_weight_decay"]
    assert not caplog.records


def test_what_a_hook_changes_in_place_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def convert(_: Any, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0].update(betas=(0.5, 0.999), lr=float("nan"))
        state_dict["state"][0]["exp_avg"] = state_dict["state"][0]["exp_avg"].double()

    saved, fresh = stepped(torch.optim.Adam), of_kind(torch.optim.Adam)
    saved.param_groups[0]["nan"] = float("nan")
    save({"opt": saved}, tmp_path / "step")
    fresh.register_load_state_dict_pre_hook(convert)
    load({"opt": fresh}, tmp_path / "step")
    for told in (
        "betas from (0.9, 0.999) to (0.5, 0.999)",
        "lr from 0.001 to nan",
        "exp_avg from torch.float32 to torch.",
    ):
        assert told in caplog.text
    assert "groups.0.nan" not in caplog.text
