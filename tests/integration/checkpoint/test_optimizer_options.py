"""Options and state of an optimizer that are tensors or containers, loaded into a fresh one as torch does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.api import load, save


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
