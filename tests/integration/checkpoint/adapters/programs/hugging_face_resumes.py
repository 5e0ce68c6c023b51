"""Trains with transformers' Trainer and an Accelerator, is stopped, resumes, and prints what came of it."""

from __future__ import annotations

import json
import logging
import warnings
from typing import TYPE_CHECKING, Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402 - after the filter
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import set_seed  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from penstock.checkpoint import Manager  # noqa: E402
from penstock.checkpoint.adapters.hugging_face import PenstockCheckpoints, load_state, save_state  # noqa: E402
from penstock.errors import UsageError  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


class Line(torch.nn.Module):
    """Small, with dropout: it comes out the same only if random numbers go on where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def forward(self, inputs: Any, labels: Any) -> dict[str, Any]:
        found = self.layers(inputs)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


class Tuner(PenstockCheckpoints, Trainer):
    pass


class Stopped(Exception):
    pass


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
        if state.global_step == self.step:
            raise Stopped


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 4, generator=generator)
    return [{"inputs": each, "labels": each.sum().reshape(1)} for each in inputs]


def tuner(folder: Path, manager: Manager | None, *callbacks: Any, **options: Any) -> Any:
    set_seed(3)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=10,
        per_device_train_batch_size=4,
        save_steps=4,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **options,
    )
    parts = {"model": Line(), "args": arguments, "train_dataset": samples(), "callbacks": list(callbacks)}
    return Trainer(**parts) if manager is None else Tuner(**parts, manager=manager)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def with_trainer(root: Path) -> dict[str, Any]:
    straight = tuner(root / "straight", None)
    straight.train()
    seen: dict[str, Any] = {}
    with Manager(root / "steps", keep=2) as manager:
        stopped = tuner(root / "run", manager, StopAt(7))
        try:
            stopped.train(resume_from_checkpoint=True)
        except Stopped:
            seen["stopped_at"] = stopped.state.global_step
    with Manager(root / "steps", keep=2) as manager:
        seen["resumed_from"] = manager.latest()
        resumed = tuner(root / "run", manager)
        resumed.train(resume_from_checkpoint=True)
        seen["steps"] = manager.steps()
        seen["ended_at"] = resumed.state.global_step
        seen["same"] = same(straight.model, resumed.model)
        seen["same_rate"] = straight.lr_scheduler.get_last_lr() == resumed.lr_scheduler.get_last_lr()
        seen["weights_beside"] = [path.name for path in (root / "run").rglob("*.safetensors")]
        try:
            tuner(
                root / "other", manager, load_best_model_at_end=True, eval_strategy="no", save_strategy="no"
            )
        except UsageError as error:
            seen["refused"] = str(error)
    return seen


def accelerated(folder: Path, stop_at: int | None) -> Any:
    """Six steps; saves the third, and goes on from what is there."""
    set_seed(5)
    accelerator = Accelerator(cpu=True)
    model = Line()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader: Any = DataLoader(samples(), batch_size=4)  # type: ignore[arg-type] # a list is a data set
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    with Manager(folder) as manager:
        begun = 0
        for step, batch in enumerate(loader, start=1):
            if step == 1:
                # A loader that begins draws a random number, which is to be forgotten.
                begun = load_state(accelerator, manager) or 0
            if step <= begun:
                continue
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step == 3:
                save_state(accelerator, manager, step)
            if step == stop_at:
                break
    accelerator.free_memory()
    return begun, model, scheduler.get_last_lr()


def with_accelerate(root: Path) -> dict[str, Any]:
    straight = accelerated(root / "straight", None)
    accelerated(root / "run", 4)
    resumed = accelerated(root / "run", None)
    return {
        "accelerate_resumed_from": resumed[0],
        "accelerate_same": same(straight[1], resumed[1]) and straight[2] == resumed[2],
    }


def main(root: Path) -> None:
    seen = with_trainer(root / "trainer") | with_accelerate(root / "accelerate")
    print(json.dumps(seen))  # noqa: T201 - what the test reads
