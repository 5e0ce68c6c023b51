"""Training that stops and goes on in new processes: its losses are those of training that never stopped.

Raw parts and the dicts of `get_state_dict`, on 1 and 2 ranks (FSDP2), saved and loaded by Penstock and by
stock torch in all four pairs of which Penstock is one side.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.child_processes import run_children
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint import state_dict as stock_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.fsdp import fully_shard

import penstock.checkpoint as pc
from penstock.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Engine = Literal["ours", "stock"]
Form = Literal["raw", "dicts"]

NUM_STEPS = 4


class Batches:
    """Shuffled samples. Between epochs it has no iterator, so its state has another structure then."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] | None = None
        self._position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self._order is None:
                self._order = torch.randperm(6, generator=self._generator).tolist()
                self._position = 0
            sample = self._order[self._position]
            self._position += 1
            if self._position == len(self._order):
                self._order = None
            yield torch.arange(8.0).repeat(4, 1) * 0.01 * (sample + 1)

    def state_dict(self) -> dict[str, Any]:
        iterator = None if self._order is None else {"order": self._order, "position": self._position}
        return {"generator": self._generator.get_state(), "iterator": iterator}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._generator.set_state(state_dict["generator"])
        iterator = state_dict["iterator"]
        self._order = None if iterator is None else iterator["order"]
        self._position = 0 if iterator is None else iterator["position"]


class Holder:
    """A part that is what it was given."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class Generators:
    """The states of all random generators."""

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - as programs use it
        numpy_state = [kind, np.asarray(keys).tolist(), *rest]
        return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.set_rng_state(state_dict["torch"])
        random.setstate(state_dict["python"])
        kind, keys, *rest = state_dict["numpy"]
        np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002 - as above


class Training:
    """A model with dropout, and everything that its training needs to go on."""

    def __init__(self, seed: int) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.4), torch.nn.Linear(16, 1)
        )
        if dist.is_initialized():
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5, 6], gamma=0.7)
        self.batches = Batches(seed + rank)
        torch.manual_seed(seed + 100 * rank)
        random.seed(seed + rank)
        np.random.seed(seed + rank)  # noqa: NPY002 - as programs use it

    def losses(self, num_steps: int) -> list[float]:
        found = []
        for _, batch in zip(range(num_steps), self.batches, strict=False):
            noise = random.random() + np.random.random()  # noqa: NPY002 - what a restart must not change
            loss = (self.model(batch) - noise).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            found.append(loss.item())
        return found

    def state(self, form: Form, own: str) -> dict[str, Any]:
        """Keys of what differs from rank to rank end with `own`."""
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if form == "dicts":
            model, optimizer = stock_state_dict.get_state_dict(self.model, self.optimizer)
            parts = {"model": model, "optimizer": optimizer}
        rest = {"scheduler": self.scheduler, f"batches{own}": self.batches, f"random{own}": Generators()}
        return {**parts, **rest, "step": NUM_STEPS}

    def take(self, state: dict[str, Any], form: Form) -> None:
        if form == "dicts":
            stock_state_dict.set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )


def own_key(engines: set[Engine]) -> str:
    """Of one name stock torch writes one rank's value, so with it what differs gets names by rank."""
    return f"_{dist.get_rank()}" if "stock" in engines and dist.is_initialized() else ""


def begin(rank: int, path: Path, engine: Engine, other: Engine, form: Form) -> list[float]:
    """Train, save, train on: the losses after the save."""
    torch.set_num_threads(1)
    training = Training(seed=1)
    training.losses(NUM_STEPS)
    state = training.state(form, own_key({engine, other}))
    if engine == "ours":
        pc.save(state, path)
    else:
        stock_save(state, checkpoint_id=path)
    return training.losses(NUM_STEPS)


def go_on(rank: int, path: Path, engine: Engine, other: Engine, form: Form) -> list[float]:
    """Load in a new process whose model has other values: the losses from there on."""
    torch.set_num_threads(1)
    training = Training(seed=50)
    if engine == "stock":
        # Stock torch asks an optimizer without state for nothing, and a loader for the structure it has.
        stock_state_dict._init_optim_state(training.optimizer)
        training.losses(1)
    state = training.state(form, own_key({engine, other}))
    state["step"] = 0
    if engine == "ours":
        pc.load(state, path)
    else:
        stock_load(state, checkpoint_id=path)
    training.take(state, form)
    assert state["step"] == NUM_STEPS
    return training.losses(NUM_STEPS)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("form", ["raw", "dicts"])
@pytest.mark.parametrize(("saver", "loader_"), [("ours", "ours"), ("ours", "stock"), ("stock", "ours")])
def test_losses_after_a_restart_are_those_without_one(
    tmp_path: Path, num_ranks: int, form: Form, saver: Engine, loader_: Engine
) -> None:
    path = tmp_path / "saved"
    if num_ranks == 1:
        (expected,) = run_children([(begin, (0, path, saver, loader_, form))], 120)
        (found,) = run_children([(go_on, (0, path, loader_, saver, form))], 120)
    else:
        expected = on_gloo_ranks(num_ranks, begin, path, saver, loader_, form)
        found = on_gloo_ranks(num_ranks, go_on, path, loader_, saver, form)
        assert len({tuple(losses) for losses in expected}) == num_ranks
    assert found == expected


@pytest.mark.parametrize(("saved", "loaded"), [("raw", "dicts"), ("dicts", "raw")])
@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_each_form_of_an_optimizer_is_loaded_into_the_other(
    tmp_path: Path, saved: Form, loaded: Form, saver: Engine
) -> None:
    path = tmp_path / "saved"
    expected = begin(0, path, saver, "ours", saved)
    assert go_on(0, path, "ours", saver, loaded) == expected


def saved_training(path: Path) -> Training:
    training = Training(seed=1)
    training.losses(1)
    pc.save(training.state("raw", ""), path)
    return training


def test_entry_of_an_optimizer_that_the_state_lacks_is_an_error_that_names_it(tmp_path: Path) -> None:
    training = saved_training(tmp_path / "saved")
    state = training.state("dicts", "")
    del state["optimizer"]["state"]["3.bias"]["exp_avg"]
    with pytest.raises(UsageError, match=r"holds 'optimizer\.state\.3\.exp_avg', which no part"):
        pc.load(state, tmp_path / "saved")


def test_entry_of_an_optimizer_that_the_checkpoint_lacks_is_an_error_that_names_it(tmp_path: Path) -> None:
    training = Training(seed=1)
    training.losses(1)
    state = training.state("dicts", "")
    del state["optimizer"]["state"]["3.bias"]["exp_avg"]
    pc.save(state, tmp_path / "saved")
    with pytest.raises(UsageError, match=r"does not hold 'optimizer\.state\.3\.bias\.exp_avg'"):
        pc.load(Training(seed=2).state("dicts", ""), tmp_path / "saved")


def training_parts(*, steps: int) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("saved_keys", "choice"),
    [
        (("model", "optimizer"), {"exclude": "optimizer.*"}),
        (("model", "optimizer"), {"only": "model.*"}),
        (("model", "optimizer"), {"exclude": "optimizer.state.*"}),
        (("model", "optimizer"), {"rename": {"optimizer.state.*": "nowhere.*"}, "strict": False}),
        (("model",), {"exclude": "optimizer.*"}),
        (("model",), {"strict": False}),
    ],
    ids=repr,
)
def test_state_of_an_optimizer_that_is_not_loaded_stays_as_it_was(
    tmp_path: Path, saved_keys: tuple[str, ...], choice: dict[str, Any], steps: int
) -> None:
    trained, other = training_parts(steps=1), training_parts(steps=steps)
    pc.save({key: trained[key] for key in saved_keys}, tmp_path / "saved")
    before = deepcopy(other["optimizer"].state_dict()["state"])
    pc.load(other, tmp_path / "saved", **choice)
    after = other["optimizer"].state_dict()["state"]
    assert after.keys() == before.keys()
    for number, slots in before.items():
        assert slots.keys() == after[number].keys()
        assert all(torch.equal(slots[slot], after[number][slot]) for slot in slots)
    assert torch.equal(trained["model"].weight, other["model"].weight)


def test_new_optimizer_gets_the_state_of_a_checkpoint_that_is_only_an_optimizer(tmp_path: Path) -> None:
    trained, fresh = training_parts(steps=1)["optimizer"], training_parts(steps=0)["optimizer"]
    torch.save(trained.state_dict(), tmp_path / "saved.pt")
    pc.load({"optimizer": fresh}, tmp_path / "saved.pt", rename={"optimizer.*": ""})
    expected, found = (each.state_dict()["state"] for each in (trained, fresh))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[number]["exp_avg"], expected[number]["exp_avg"]) for number in expected)


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "stepped"])
def test_parts_that_have_other_names_now_get_the_state_that_was_saved(tmp_path: Path, steps: int) -> None:
    trained, other = training_parts(steps=1), training_parts(steps=steps)
    history = {"losses": [0.5, 0.25]}
    pc.save({"net": trained["model"], "opt": trained["optimizer"], "log": history}, tmp_path / "saved")
    state = {**other, "history": {}}
    rename = {"model.*": "net.*", "optimizer.*": "opt.*", "history.*": "log.*"}
    pc.load(state, tmp_path / "saved", rename=rename)
    assert torch.equal(trained["model"].weight, other["model"].weight)
    expected, found = (each["optimizer"].state_dict()["state"] for each in (trained, other))
    assert found.keys() == expected.keys()
    for number, slots in expected.items():
        assert slots.keys() == found[number].keys()
        assert all(torch.equal(slots[slot], found[number][slot]) for slot in slots)
    assert state["history"] == history


@pytest.mark.parametrize("choice", [{"exclude": "optimizer.state.*"}, {"only": "model.*"}], ids=repr)
def test_what_is_left_out_of_a_part_that_has_another_name_now_stays_as_it_was(
    tmp_path: Path, choice: dict[str, Any]
) -> None:
    trained, fresh = training_parts(steps=1), training_parts(steps=0)
    pc.save({"net": trained["model"], "opt": trained["optimizer"]}, tmp_path / "saved")
    pc.load(fresh, tmp_path / "saved", rename={"model.*": "net.*", "optimizer.*": "opt.*"}, **choice)
    assert torch.equal(trained["model"].weight, fresh["model"].weight)
    assert not fresh["optimizer"].state


def test_some_of_a_state_is_loaded_only_where_an_optimizer_has_the_rest(tmp_path: Path) -> None:
    trained, stepped = training_parts(steps=1), training_parts(steps=2)
    pc.save(trained, tmp_path / "saved")
    own = deepcopy(stepped["optimizer"].state_dict()["state"])
    pc.load(stepped, tmp_path / "saved", exclude="*.exp_avg_sq")
    for number, slots in trained["optimizer"].state_dict()["state"].items():
        loaded = stepped["optimizer"].state_dict()["state"][number]
        assert torch.equal(loaded["exp_avg"], slots["exp_avg"])
        assert torch.equal(loaded["exp_avg_sq"], own[number]["exp_avg_sq"])
    fresh = training_parts(steps=0)
    with pytest.raises(UsageError, match=r"'optimizer' has no state yet.*0\.exp_avg_sq.*is skipped"):
        pc.load(fresh, tmp_path / "saved", exclude="*.exp_avg_sq")
    assert not fresh["optimizer"].state


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
def test_optimizer_gets_back_dicts_of_its_own_with_their_keys(tmp_path: Path, steps: int) -> None:
    odd = {"a": torch.ones(1), "e": {}, 7: 5, (1, "b"): {"3": None}, "list": [{}, {2: torch.ones(2)}]}
    trained, other = training_parts(steps=1), training_parts(steps=steps)
    trained["optimizer"].state[trained["model"].weight]["own"] = odd
    pc.save(trained, tmp_path / "saved")
    pc.load(other, tmp_path / "saved")
    loaded = other["optimizer"].state[other["model"].weight]["own"]
    assert sorted(map(repr, loaded.items())) == sorted(map(repr, odd.items()))
    # Stock torch has no names for empty dicts, and no types of keys.
    del odd["list"]
    stock_save(
        {"optimizer": trained["optimizer"].state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True
    )
    again = training_parts(steps=0)["optimizer"]
    pc.load({"optimizer": again}, tmp_path / "stock")
    found = next(iter(again.state.values()))["own"]
    assert found.keys() == {"a", 7, "(1, 'b')"}


def test_what_is_not_loaded_of_any_other_part_stays_as_it_was(tmp_path: Path) -> None:
    part = Holder({"at": 5, "order": torch.ones(4), "seen": [torch.ones(2), torch.ones(3)]})
    pc.save({"part": part, "step": 1}, tmp_path / "saved")
    own = {"at": 0, "order": torch.zeros(2), "seen": [torch.zeros(9)]}
    other = Holder(own)
    pc.load({"part": other, "step": 0}, tmp_path / "saved", exclude=["part.order", "part.seen.*"])
    assert other.state["at"] == 5
    assert other.state["order"] is own["order"]
    assert [len(each) for each in other.state["seen"]] == [9]
    untouched = Holder(own)
    pc.load({"part": untouched, "step": 0}, tmp_path / "saved", only="step")
    assert untouched.state is own


def test_what_a_module_does_not_take_is_a_warning_that_names_it_unless_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_training(tmp_path / "saved")
    smaller = torch.nn.Sequential(torch.nn.Linear(8, 16))
    with pytest.raises(UsageError, match=r"holds 'model\.3\.bias', 'model\.3\.weight', which no part"):
        pc.load({"model": smaller}, tmp_path / "saved")
    pc.load({"model": smaller}, tmp_path / "saved", exclude="model.3.*")
    assert "Not loaded" not in caplog.text
    pc.load({"model": smaller}, tmp_path / "saved", strict=False)
    assert "no part of the state takes it: model.3." in caplog.text


def schedule_by_tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    kinds = torch.optim.lr_scheduler
    parts = [kinds.LinearLR(optimizer), kinds.CosineAnnealingLR(optimizer, 20)]
    scheduler = kinds.SequentialLR(optimizer, parts, [3])
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def test_tensors_that_a_scheduler_shares_with_another_at_first_are_loaded_apart(tmp_path: Path) -> None:
    def train(state: dict[str, Any], num_steps: int) -> None:
        for _ in range(num_steps):
            state["model"](torch.ones(2, 4)).square().mean().backward()
            for part in ("optimizer", "scheduler"):
                state[part].step()
            state["optimizer"].zero_grad()

    straight, fresh = schedule_by_tensors(), schedule_by_tensors()
    train(straight, 5)
    pc.save(straight, tmp_path / "saved")
    pc.load(fresh, tmp_path / "saved")
    for state in (straight, fresh):
        train(state, 3)
    assert torch.equal(fresh["model"].weight, straight["model"].weight)
    saved, loaded = straight["scheduler"].state_dict(), fresh["scheduler"].state_dict()
    assert loaded["_last_lr"] == saved["_last_lr"]


@pytest.mark.parametrize(
    "state",
    [
        {"x": 1.0, "x@rank0": 2.0},
        {"adapter": torch.ones(2), "adapter@rank1": torch.zeros(2)},
        {"model": torch.nn.ParameterDict({"w": torch.ones(2), "w@rank1": torch.full((2,), 7.0)})},
    ],
    ids=["objects", "tensors", "parameters"],
)
def test_name_that_looks_like_another_rank_s_value_is_refused(
    state: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="own value of the first"):
        pc.save(state, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_name_that_looks_like_a_rank_s_value_of_nothing_comes_back(tmp_path: Path) -> None:
    pc.save({"w@rank1": torch.full((2,), 7.0)}, tmp_path / "saved")
    fresh = {"w@rank1": torch.zeros(2)}
    pc.load(fresh, tmp_path / "saved")
    assert fresh["w@rank1"].tolist() == [7, 7]


def test_dict_names_what_it_wants_and_the_rest_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_training(tmp_path / "saved")
    bias = torch.zeros(16)
    pc.load({"model": {"0": {"bias": bias}}}, tmp_path / "saved")
    assert bias.any()
    assert "no part of the state takes it: model.0.weight, model.3.bias, model.3.weight" in caplog.text


def save_stages(rank: int, path: Path, *, names: bool) -> str:
    """Two stages of one pipeline, of equal shapes, each with an optimizer of its own."""
    model = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    model[f"stage{rank}"](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    pc.save(state, path / "model", only="model.*")
    if names:
        state["optimizer"] = stock_state_dict.get_optimizer_state_dict(model, optimizer)
    try:
        pc.save(state, path / "all")
    except UsageError as error:
        return str(error)
    return ""


def save_stages_by_number(rank: int, path: Path) -> str:
    return save_stages(rank, path, names=False)


def save_stages_by_name(rank: int, path: Path) -> str:
    return save_stages(rank, path, names=True)


def test_optimizers_that_number_other_parameters_alike_are_refused(tmp_path: Path) -> None:
    for told in on_gloo_ranks(2, save_stages_by_number, tmp_path):
        assert "'optimizer' numbers different parameters on rank 1 than on rank 0" in told
    assert not (tmp_path / "all").exists()
    assert on_gloo_ranks(2, save_stages_by_name, tmp_path) == ["", ""]


def load_own_layer(rank: int, path: Path) -> tuple[int, ...]:
    own = {"model": torch.nn.ModuleDict({f"layer{rank}": torch.nn.Linear(2, 2)})}
    pc.save(own, path)
    pc.load(own, path)
    try:
        pc.load({"model": torch.nn.ModuleDict({"layer0": torch.nn.Linear(2, 2)})}, path)
    except UsageError as error:
        assert "layer1" in str(error)  # noqa: PT017 - in a child process
        return (rank, 1)
    return (rank, 0)


def test_what_another_rank_takes_is_no_error(tmp_path: Path) -> None:
    assert on_gloo_ranks(2, load_own_layer, tmp_path / "saved") == [(0, 1), (1, 1)]


def test_the_first_restore_of_a_process_imports_nothing(tmp_path: Path) -> None:
    with pc.Manager(tmp_path) as manager:
        manager.save(1, {"w": torch.ones(4, 4)})
    program = f"""
import sys
import torch
import penstock.checkpoint as pc
with pc.Manager({str(tmp_path)!r}) as manager:
    known, state = set(sys.modules), {{"w": torch.zeros(4, 4)}}
    manager.restore(state)
    print(*sorted(set(sys.modules) - known), float(state["w"].sum()))
    # Half a second: what makes no DTensors needs none of it.
    assert "torch.distributed.tensor" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["16.0"]
