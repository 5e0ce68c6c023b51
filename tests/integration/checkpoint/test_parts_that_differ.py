"""Loads into parts that are not quite what was saved: all of it comes back, or an error says what differs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

import penstock.checkpoint as pc
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.checkpoint.state.walk import NamePatterns

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Part:
    """A part that keeps anything."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state_dict: Any) -> None:
        self.value = state_dict


@pytest.mark.parametrize(
    "value",
    [
        {"workers": [{}, {}], "at": 3},
        {"workers": [None, {}]},
        {"workers": [{}, {"at": 1}]},
        {"workers": [[{}], 5]},
        {"workers": [{"queue": [{}]}]},
        [{}],
    ],
    ids=str,
)
def test_lists_of_empty_dicts_come_back_into_a_part(tmp_path: Path, value: Any) -> None:
    pc.save({"part": Part(value)}, tmp_path / "saved")
    for fresh in (value, type(value)()):
        part = Part(fresh)
        pc.load({"part": part}, tmp_path / "saved")
        assert part.value == value


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def parameters(layer: torch.nn.Module, prefix: str, *, is_named: bool) -> Any:
    return list(layer.named_parameters(prefix)) if is_named else list(layer.parameters())


@pytest.fixture(name="saved")
def _saved(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A checkpoint of an AdamW with a group for each layer; a parameter says whether it has names."""
    module = model()
    groups = [
        {"params": parameters(layer, str(n), is_named=getattr(request, "param", False))}
        for n, layer in enumerate(module)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    module(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    pc.save({"model": module, "opt": optimizer}, tmp_path / "saved")
    return tmp_path / "saved"


PATTERNS: list[NamePatterns | None] = [None, ["opt.state.[23].*", "opt.param_groups.1.*"]]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("exclude", PATTERNS)
def test_optimizer_of_fewer_groups_gets_nobodys_state(
    saved: Path, *, strict: bool, exclude: NamePatterns | None
) -> None:
    module = model()
    optimizer = torch.optim.AdamW(module[1].parameters())
    with pytest.raises(UsageError, match=r"'opt' has 1 group of parameters, and the checkpoint has 2"):
        pc.load({"model": module, "opt": optimizer}, saved, strict=strict, exclude=exclude)
    pc.load({"model": module, "opt": optimizer}, saved, exclude="opt.*")
    assert not optimizer.state


@pytest.mark.parametrize("saved", [True], indirect=True)
def test_groups_of_other_names_are_refused_and_new_names_can_be_taken(saved: Path) -> None:
    module = model()
    swapped = [parameters(module[n], str(n), is_named=True) for n in (1, 0)]
    optimizer = torch.optim.AdamW([{"params": each} for each in swapped])
    state = {"model": module, "opt": optimizer}
    with pytest.raises(UsageError, match=r"'0\.weight' was where '1\.weight' is"):
        pc.load(state, saved, strict=False)
    pc.load(state, saved, exclude="opt.param_groups.*.param_names")
    assert optimizer.param_groups[0]["param_names"] == ["1.weight", "1.bias"]


@pytest.mark.parametrize("strict", [True, False])
def test_optimizer_of_another_class_is_refused(saved: Path, *, strict: bool) -> None:
    module = model()
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in module], lr=0.5)
    with pytest.raises(
        UsageError, match=r"'opt' is SGD, and was saved from another optimizer: only one of the two"
    ):
        pc.load({"model": module, "opt": optimizer}, saved, strict=strict)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_what_a_load_that_is_not_strict_leaves_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pc.Manager(tmp_path) as manager:
        manager.save(1, {"model": torch.nn.Linear(2, 2)})
        with caplog.at_level(logging.WARNING):
            manager.restore({"model": torch.nn.Linear(2, 2), "epoch": 7}, strict=False)
    assert "Missing from the checkpoint, left unchanged: epoch" in caplog.text


@pytest.mark.parametrize("header_bytes", [0x0280, 0x4B50])
def test_safetensors_are_known_whatever_the_length_of_their_header(tmp_path: Path, header_bytes: int) -> None:
    file, found = tmp_path / "w.safetensors", {"w": torch.zeros(2)}
    size = 0
    for padding in range(header_bytes - 200, header_bytes, 1):
        save_file({"w": torch.ones(2)}, file, metadata={"m": "x" * padding})
        size = int.from_bytes(file.read_bytes()[:8], "little")
        if size >= header_bytes:
            break
    assert size == header_bytes
    pc.load(found, file)
    assert found["w"].tolist() == [1, 1]


def test_background_saves_do_not_pile_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pc.Manager(tmp_path, keep=2) as manager:
        handles = [manager.save_async(step, {"w": torch.full((16,), step)}) for step in range(60)]
        assert sum(not handle.done for handle in handles) <= 8
    assert caplog.text.count("Saves take longer than the time between them") <= 1
    assert manager.steps() == [58, 59]


SHARD_BYTES = 128 << 20


def memory_bytes(kind: str) -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[kind].split()[0]) * 1024


def shard_growth(rank: int, path: Path) -> int:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((SHARD_BYTES // 4,), -1, dtype=torch.int32)
    state = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    pc.load({"w": torch.zeros(8)}, path.with_name("warm"))
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    pc.load(state, path)
    assert local[0] == rank * len(local)
    return memory_bytes("VmHWM") - before


def test_long_shards_need_no_list_of_their_rows(tmp_path: Path) -> None:
    pc.save({"w": torch.zeros(8)}, tmp_path / "warm")
    pc.save({"w": torch.arange(SHARD_BYTES // 2, dtype=torch.int32)}, tmp_path / "saved")
    # Torch's list of rows would be twice a shard.
    assert max(on_gloo_ranks(2, shard_growth, tmp_path / "saved")) < SHARD_BYTES * 1.5


def grown() -> dict[str, Any]:
    return {
        "best": torch.arange(3.0),
        "history": [{"loss": 1.0}, {"loss": 0.5, "at": torch.ones(2)}],
        "metrics": {"train": {7: torch.ones(3), 8: "x"}},
        "trainer": {"ema": [torch.ones(2)], "last": {"step": 3}, "tags": ["a"], "nothing": None},
        "steps": 2,
    }


def as_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def fresh() -> dict[str, Any]:
    return {
        "best": None,
        "history": [],
        "metrics": {},
        "trainer": {"ema": [], "last": None, "tags": [], "nothing": 5},
        "steps": 0,
    }


def test_a_fresh_state_gets_what_was_saved_where_it_has_nothing_yet(tmp_path: Path) -> None:
    pc.save(grown(), tmp_path / "saved")
    state = fresh()
    metrics, history, trainer = state["metrics"], state["history"], state["trainer"]
    pc.load(state, tmp_path / "saved")
    assert tree_map(as_list, state) == tree_map(as_list, grown())
    assert state["metrics"] is metrics
    assert state["history"] is history
    assert state["trainer"] is trainer


def test_a_failed_load_leaves_what_is_empty(tmp_path: Path) -> None:
    pc.save(grown(), tmp_path / "saved")
    state = {**fresh(), "steps": 0, "lost": torch.ones(1)}
    with pytest.raises(UsageError, match="'lost'"):
        pc.load(state, tmp_path / "saved")
    (tmp_path / "saved" / "__0_0.distcp").unlink()
    del state["lost"]
    with pytest.raises(FileNotFoundError):
        pc.load(state, tmp_path / "saved")
    assert state == fresh()


def test_what_is_excluded_below_something_empty_is_left_out(tmp_path: Path) -> None:
    pc.save(grown(), tmp_path / "saved")
    state = fresh()
    pc.load(state, tmp_path / "saved", exclude=["best", "history.1.*", "metrics.train.7", "trainer.*"])
    found = {"history": [{"loss": 1.0}], "metrics": {"train": {8: "x"}}, "steps": 2}
    assert state == {**fresh(), **found}


def test_a_fresh_dict_of_an_optimizer_gets_its_state(tmp_path: Path) -> None:
    saved, other = (torch.optim.AdamW(model().parameters()) for _ in range(2))
    for parameter in saved.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    pc.save({"optimizer": saved.state_dict()}, tmp_path / "saved")
    state = {"optimizer": other.state_dict()}
    pc.load(state, tmp_path / "saved")
    torch.testing.assert_close(state["optimizer"], saved.state_dict(), rtol=0, atol=0)


def load_where_one_rank_has_nothing(rank: int, folder: Path) -> Any:
    pc.save({"stage": {"w": torch.ones(2)}, "history": [{"at": 1}]}, folder / "saved")
    state: dict[str, Any] = {"stage": {} if rank else {"w": torch.zeros(2)}, "history": []}
    pc.load(state, folder / "saved")
    return {**state, "stage": {name: part.tolist() for name, part in state["stage"].items()}}


def test_a_dict_that_another_rank_has_filled_stays_empty(tmp_path: Path) -> None:
    assert on_gloo_ranks(2, load_where_one_rank_has_nothing, tmp_path) == [
        {"stage": {"w": [1.0, 1.0]}, "history": [{"at": 1}]},
        {"stage": {}, "history": [{"at": 1}]},
    ]


def of_digits(*order: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module whose parameters are named "0" to "2", and moments that tell them apart."""
    module = torch.nn.ParameterList([torch.ones(1) for _ in range(3)])
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD([{"params": [parameters[number]]} for number in order], momentum=1)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full((1,), number + 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def moments(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return [optimizer.state[each]["momentum_buffer"].item() for each in module.parameters()]


@pytest.mark.parametrize("kind", ["penstock", "stock", "torch.save"])
@pytest.mark.parametrize("is_named", [False, True])
def test_moments_of_parameters_whose_names_are_digits_stay_with_them(
    tmp_path: Path, kind: str, *, is_named: bool
) -> None:
    module, optimizer = of_digits(2, 0, 1)
    named: Any = get_optimizer_state_dict(module, optimizer)
    saved = {"model": module.state_dict(), "optimizer": named if is_named else optimizer.state_dict()}
    if kind == "penstock":
        pc.save(saved, tmp_path / "saved")
    elif kind == "stock":
        stock_save(saved, checkpoint_id=tmp_path / "saved")
    else:
        torch.save(saved, tmp_path / "saved")
    again, fresh = of_digits(2, 0, 1)
    fresh.state.clear()
    pc.load({"model": again, "optimizer": fresh}, tmp_path / "saved", exclude="optimizer.param_groups.*")
    assert moments(again, fresh) == [1, 2, 3]
    for slots in named["state"].values():
        slots["momentum_buffer"].zero_()
    pc.load({"optimizer": named}, tmp_path / "saved")
    set_optimizer_state_dict(again, fresh, named)
    assert moments(again, fresh) == [1, 2, 3]
