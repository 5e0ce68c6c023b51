"""Saves and loads through torchtitan's checkpoint managers, its own and ours, and prints what came of it."""

from __future__ import annotations

import json
import logging
import warnings
from typing import TYPE_CHECKING, Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402 - after the filter
from tests.integration.checkpoint.adapters.programs.ranks import on_forked_ranks  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torchtitan.components.checkpointer.dcp import CheckpointManager  # noqa: E402

from penstock.checkpoint.adapters.torchtitan import PenstockCheckpointManager  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


class Optimizers(torch.optim.Optimizer):
    """Itself an optimizer, with a state of one level by long names, as torchtitan's container of them."""

    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.model = model
        self.inner = torch.optim.AdamW(model.parameters(), lr=0.01)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.inner, options=self.flat)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.inner, state, options=self.flat)


class Schedulers:
    def __init__(self, optimizers: Optimizers) -> None:
        self.inner = torch.optim.lr_scheduler.StepLR(optimizers.inner, 2, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class Progress:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Run:
    """A model that learns, with a checkpoint manager as torchtitan's trainer makes it."""

    def __init__(self, kind: Any, root: Path, **options: Any) -> None:
        torch.manual_seed(4)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.optimizers = Optimizers(self.model)
        self.schedulers = Schedulers(self.optimizers)
        self.progress = Progress()
        self.manager = kind(
            kind.Config(enable=True, interval=2, last_save_model_only=False, **options),
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=None,
            base_folder=str(root),
        )
        del self.manager.states["dataloader"]

    def train(self, until: int) -> Run:
        while self.progress.step < until:
            self.progress.step += 1
            inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(self.progress.step))
            (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.inner.step()
            self.schedulers.inner.step()
            self.optimizers.inner.zero_grad()
            self.manager.save(self.progress.step)
        self.manager.maybe_wait_for_saving()
        return self

    def is_as(self, other: Run) -> bool:
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        rates = self.schedulers.inner.get_last_lr(), other.schedulers.inner.get_last_lr()
        return all(torch.equal(mine, theirs) for mine, theirs in pairs) and rates[0] == rates[1]


def runs(_rank: int, root: Path) -> dict[str, Any]:
    """Trains four steps with one manager, and three more with another that loads what it saved."""
    straight = Run(CheckpointManager, root / "straight").train(7)
    seen: dict[str, Any] = {}
    ours, stock = PenstockCheckpointManager, CheckpointManager
    for name, first, second, mode in (
        ("ours", ours, ours, "disabled"),
        ("async", ours, ours, "async"),
        ("pinned", ours, ours, "async_with_pinned_mem"),
        ("stock_loads_ours", ours, stock, "disabled"),
        ("ours_loads_stock", stock, ours, "disabled"),
    ):
        begun = Run(first, root / name, async_mode=mode, keep_latest_k=2).train(4)
        begun.manager.close()
        resumed = Run(second, root / name, keep_latest_k=2)
        seen[f"{name}_found"] = resumed.manager.load()
        seen[f"{name}_step"] = resumed.progress.step
        seen[f"{name}_same"] = resumed.train(7).is_as(straight)
        resumed.manager.close()
        seen[f"{name}_files"] = sorted(path.name for path in (root / name / "checkpoint").iterdir())
    seen["found_in_nothing"] = Run(ours, root / "nothing").manager.load()
    return seen


def main(root: Path) -> None:
    print(json.dumps(on_forked_ranks(1, runs, root)[0]))  # noqa: T201 - what the test reads
