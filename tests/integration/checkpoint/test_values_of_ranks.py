"""Tensors that ranks hold under one name: shared if they are replicas, each rank's own if they differ."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.gloo_ranks import on_gloo_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock.checkpoint as pc
from penstock.checkpoint.replica_comparison import add_digests
from penstock.checkpoint.state.tensors import collect_for_save
from penstock.errors import RankError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Told = dict[str, list[Any]]
    State = dict[str, Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:FSDP:FutureWarning"),
]


class Warnings(logging.Handler):
    """What the package has warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._text: list[str] = []
        logging.getLogger("penstock").addHandler(self)

    def told(self) -> list[str]:
        """What was said so far."""
        return list(self._text)

    def emit(self, record: logging.LogRecord) -> None:
        self._text.append(record.getMessage())


def load_keys_with_a_mark(rank: int, root: Path) -> list[Any]:
    found: list[Any] = []
    states: dict[str, State] = {
        "alone": {"w@rank1": 0, "part": {"w@rank1": torch.zeros(1)}},
        "other": {"w": 0, "part": {"w": torch.zeros(1)}},
        "stock": {"w": torch.zeros(1), "w@rank1": torch.zeros(1)},
        "nested": {"part": {"w": torch.zeros(1)}},
        "written": {"w": torch.zeros(1)},
    }
    for name, state in states.items():
        pc.load(state, root / name, strict=False)
        if "part" in state:
            (state["part"],) = state["part"].values()
        found.append({key: float(value) for key, value in state.items()})
    planned: State = {"part": {"w": torch.zeros(1)}}
    stock_load(planned, checkpoint_id=root / "nested", planner=pc.LoadPlanner())
    return [*found, float(planned["part"]["w"])]


def test_key_that_looks_like_another_ranks_value_is_only_loaded_as_itself(tmp_path: Path) -> None:
    saved: State = {"w@rank1": 7, "part": {"w@rank1": torch.ones(1)}}
    pc.save(saved, tmp_path / "alone")
    pc.save(saved, tmp_path / "other")
    both = {"w": torch.ones(1), "w@rank1": torch.full((1,), 7.0)}
    stock_save(both, checkpoint_id=tmp_path / "stock", no_dist=True)
    stock_save({"part": both}, checkpoint_id=tmp_path / "nested", no_dist=True)
    stock_save(both, storage_writer=pc.Writer(tmp_path / "written"), no_dist=True)
    for size in (1, 2):
        for found in on_gloo_ranks(size, load_keys_with_a_mark, tmp_path):
            alone, other, stock, nested, written, planned = found
            assert alone == {"w@rank1": 7, "part": 1}
            assert other == {"w": 0, "part": 0}
            assert stock == {"w": 1, "w@rank1": 7}
            assert nested == {"part": 1}
            assert written == {"w": 1}
            assert planned == 1


def layers() -> nn.Module:
    """Layers whose flat parameter is cut within the first, and buffers that each rank keeps for itself."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))


def trained(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> State:
    """A model and its optimizer after two steps on data of this rank."""
    torch.manual_seed(1)
    model = wrap(layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(rank)
    for _ in range(2):
        model(torch.randn(4, 8, generator=data)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def values_of(state: State) -> dict[str, torch.Tensor]:
    return {leaf.name: leaf.value for leaf in collect_for_save(state).leaves if hasattr(leaf.value, "shape")}


def come_back(
    root: Path, rank: int, wrap: Callable[[nn.Module], nn.Module]
) -> tuple[bool, list[str], list[str]]:
    """Whether all tensors come back, what was compared, and what was warned of."""
    state, warnings = trained(rank, wrap), Warnings()
    compared = add_digests(collect_for_save(state), state, range(2)).holdings.compared
    expected = {name: value.clone() for name, value in values_of(state).items()}
    pc.save(state, root)
    torch.manual_seed(2)
    model = wrap(layers())
    found = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    pc.load(found, root)
    loaded = values_of(found)
    same = loaded.keys() == expected.keys() and all(
        torch.equal(whole(loaded[name]), whole(value)) for name, value in expected.items()
    )
    return same, [held.name for held in compared], warnings.told()


def whole(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def fsdp1_flat(rank: int, root: Path) -> Any:
    return come_back(root, rank, lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")))


def fsdp1_original(rank: int, root: Path) -> Any:
    return come_back(
        root,
        rank,
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
    )


def hsdp(rank: int, root: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def shard(model: nn.Module) -> nn.Module:
        fully_shard(model, mesh=mesh)
        return model

    return come_back(root, rank, shard)


def unsynced(rank: int, root: Path) -> Any:
    return come_back(root, rank, lambda model: model)


def ddp(rank: int, root: Path) -> Any:
    same, *told = come_back(root, rank, DistributedDataParallel)
    # Between two passes, buffers are those of the first rank.
    return (same or rank > 0, *told)


def plain(rank: int, root: Path) -> dict[str, Any]:
    warnings = Warnings()
    with pc.Manager(root) as manager:
        state: State = {
            "equal": torch.ones(70_000),
            "w": torch.ones(70_000),
            "rows": torch.ones(3),
            "step": 1,
        }
        manager.save(1, state)
        state["w"][-1] += rank
        state["rows"] = torch.full((3 + rank,), rank)
        state["loader"] = torch.full((5,), rank, dtype=torch.uint8)
        compared_s = manager.save(2, state).ranks[rank].compare_s
        manager.save(3, state)
        for step in (2, 3):
            found = {name: torch.zeros_like(value) for name, value in state.items() if name != "step"}
            manager.restore(found, step=step)
            assert all(torch.equal(value, state[name]) for name, value in found.items())
    sizes = [file.stat().st_size for file in sorted((root / "step-3").glob("*.distcp"))]
    refused = ""
    try:
        pc.save(state, root / "compared", replicas="compare")
    except (RankError, UsageError) as error:
        refused = str(error)
    return {"told": warnings.told(), "compared_s": compared_s, "bytes": sum(sizes), "refused": refused}


def through_torch(rank: int, root: Path) -> Any:
    warnings = Warnings()
    stock_save(
        {"w": torch.full((3,), rank), "both": torch.ones(2)},
        storage_writer=pc.Writer(root),
        planner=pc.SavePlanner(),
    )
    found = {"w": torch.zeros(3, dtype=torch.int64), "both": torch.zeros(2)}
    pc.load(found, root)
    return found["w"].tolist(), found["both"].tolist(), warnings.told()


def planned(rank: int, _root: Path) -> str:
    return str(pc.dry_run({"w": torch.full((300,), float(rank))}))


PROGRAMS = (fsdp1_flat, fsdp1_original, hsdp, unsynced, ddp, plain, through_torch, planned)


def all_programs(rank: int, root: Path) -> dict[str, Any]:
    return {program.__name__: program(rank, root / program.__name__) for program in PROGRAMS}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def told(root: Path) -> Told:
    """What each program returned on each rank; all of them run in one job, whose start costs most."""
    first, second = on_gloo_ranks(2, all_programs, root)
    return {name: [first[name], second[name]] for name in first}


@pytest.mark.parametrize("mode", ["fsdp1_flat", "fsdp1_original"])
def test_each_rank_gets_back_its_own_moments_of_an_fsdp1_module(told: Told, mode: str) -> None:
    assert [same for same, _, _ in told[mode]] == [True, True]
    (_, compared, warned), (_, _, others) = told[mode]
    assert "optimizer.state.0.exp_avg" in compared
    (warning,) = (text for text in warned if "optimizer.state.0.exp_avg" in text)
    assert "only 2 ranks can load them" in warning
    assert "get_optimizer_state_dict" in warning
    assert not others


def test_what_hsdp_shards_is_not_compared(told: Told) -> None:
    for same, compared, _ in told["hsdp"]:
        assert same
        assert all("running_" in name or "num_batches" in name for name in compared), compared


def test_what_ddp_keeps_equal_is_not_compared(told: Told) -> None:
    for same, compared, warned in told["ddp"]:
        assert same
        assert not compared
        assert not warned


def test_each_rank_gets_back_its_own_of_a_module_that_nothing_keeps_equal(told: Told) -> None:
    assert [same for same, _, _ in told["unsynced"]] == [True, True]
    assert "model.0.weight" in told["unsynced"][0][1]


def test_tensors_that_begin_to_differ_are_each_ranks_own_and_named_once(told: Told) -> None:
    first, second = told["plain"]
    (warning,) = first["told"]
    assert warning.startswith(
        "Ranks have different values of w, rows. Each rank's own are saved, 273 KiB in addition"
    )
    assert not second["told"]
    assert first["compared_s"] > 0
    # What is equal is still saved once.
    assert 3 * 280_000 < first["bytes"] < 4 * 280_000


def test_asked_to_compare_a_save_refuses_them(told: Told) -> None:
    for each in told["plain"]:
        assert (
            re.search("Replicas have drifted apart.*w differs", each["refused"]) or "rows" in each["refused"]
        )


def test_torchs_own_save_keeps_each_ranks_own(told: Told) -> None:
    (first, both, warned), (second, also, _) = told["through_torch"]
    assert (first, second, both, also) == ([0, 0, 0], [1, 1, 1], [1, 1], [1, 1])
    assert "different values of w" in "".join(warned)


def test_a_dry_run_plans_what_each_rank_has_of_its_own(told: Told) -> None:
    assert "w@rank1  float32 [300]" in told["planned"][0]


def load_with_other_ranks(rank: int, root: Path) -> list[str]:
    """What is said of values of two ranks: of shards an error, of others a warning."""
    torch.manual_seed(1)
    model, warnings = layers(), Warnings()
    optimizer = torch.optim.AdamW(model.parameters())
    found = {"w": torch.zeros(3, dtype=torch.int64)}
    pc.load(found, root / "through_torch")
    assert found["w"].tolist() == [rank if rank < 2 else 0] * 3
    said = ["".join(warnings.told())]
    for state, name in (
        ({"optimizer": optimizer}, "fsdp1_flat"),
        ({"optimizer": optimizer}, "fsdp1_original"),
        ({"model": model}, "unsynced"),
    ):
        try:
            pc.load(state, root / name, only=[f"{key}.*" for key in state])
        except (UsageError, RankError) as error:
            said.append(str(error))
    pc.load({"model": model, "optimizer": optimizer}, root / "unsynced", only="model.1.running_*")
    return said


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.usefixtures("told")
def test_with_another_number_of_ranks_shards_are_refused(root: Path, num_ranks: int) -> None:
    said = (
        load_with_other_ranks(0, root)
        if num_ranks == 1
        else on_gloo_ranks(num_ranks, load_with_other_ranks, root)[0]
    )
    assert "w" in said[0]
    assert len(said) == 4
    for text, name in zip(
        said[1:], ["optimizer.state.0.exp_avg", "optimizer.state", "model.0."], strict=True
    ):
        assert name in text
        assert f"on each of the 2 ranks that saved them, and this job has {num_ranks}" in text
