"""Checkpoints of Hugging Face's Trainer and Accelerate, through a manager that the caller creates.

    class Tuner(PenstockCheckpoints, Trainer): ...
    Tuner(model=..., args=..., train_dataset=..., manager=Manager("/pfs/run", keep=3)).train(True)

All ranks save and load together. Parameters and optimizer states are saved under the names that torch's own
state-dict functions give them, so a checkpoint does not depend on how FSDP or DDP sharded it. Invariant: the
trainer's state, random numbers and scheduler, from which a run resumes, are in the same step as its weights.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from penstock.checkpoint.manager.manager import Manager, SaveHandle
from penstock.errors import UsageError

logger = logging.getLogger(__name__)

TRAINER_STATE_NAME = "trainer_state.json"
"""The file from which transformers' Trainer resumes."""

_Trainer: Any = object
"""The base class at run time: a mixin does not know with which Trainer it is combined."""


class PenstockCheckpoints(_Trainer):
    """Makes a Trainer save to a manager and resume from it: a mixin, listed before the Trainer's class.

    The Trainer decides when to save; its own `checkpoint-N` folders then contain only its state.
    `train(resume_from_checkpoint=True)` resumes from the manager's newest step, or starts from the beginning
    if there is none. With background=False, training waits for each commit.
    """

    def __init__(
        self, *args: Any, manager: Manager, background: bool = True, trust: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.args.load_best_model_at_end:
            raise UsageError(
                "load_best_model_at_end=True looks for weights in the Trainer's own folders",
                fix="Leave it out, and restore the best step from the manager.",
            )
        self._manager = manager
        self._in_background = background
        self._trust = trust
        self._is_saving = False
        self._handles: list[SaveHandle] = []
        self._resumed_step: int | None = None
        self._resumed_random_state: Any = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, and return when all saves are committed."""
        self._resumed_step = None
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._folder_of_newest()
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        for handle in self._handles:
            handle.result()
        self._handles.clear()
        return result

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Export a model as usual; within a checkpoint, do nothing, because the manager saves it."""
        if not self._is_saving:
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._is_saving = True
        try:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            super()._save_checkpoint(model, trial)
        finally:
            self._is_saving = False
        state = self._training_state()
        if self._in_background:
            self._handles = [handle for handle in self._handles if not handle.done]
            self._handles.append(self._manager.save_async(self.state.global_step, state))
        else:
            self._manager.save(self.state.global_step, state)

    def _left_to_the_manager(self, _folder: str) -> None:
        """Do nothing, because the manager saves this part."""

    _save_optimizer_and_scheduler = _save_scaler = _save_rng_state = _left_to_the_manager

    def _load_from_checkpoint(self, folder: str, model: Any = None) -> None:
        # Weights are restored together with the optimizer's state, once there is an optimizer.
        if self._resumed_step is None:
            super()._load_from_checkpoint(folder, model)

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        if self._resumed_step is None:
            super()._load_optimizer_and_scheduler(folder)
            return
        state = self._training_state()
        self._manager.restore(state, step=self._resumed_step, trust=self._trust)
        _restore_parts(state, *self._parts())
        self._resumed_random_state = state["noise"]

    def _load_scaler(self, folder: str | None) -> None:
        if self._resumed_step is None:
            super()._load_scaler(folder)

    def _load_rng_state(self, folder: str | None) -> None:
        if self._resumed_step is None:
            super()._load_rng_state(folder)
        else:
            set_random_state(self._resumed_random_state)

    def _training_state(self) -> dict[str, Any]:
        with TemporaryDirectory() as folder:
            file = Path(folder) / TRAINER_STATE_NAME
            self.state.save_to_json(str(file))
            return {**_state_of(*self._parts()), "trainer": file.read_text()}

    def _parts(self) -> _Parts:
        return [self.model], [self.optimizer], [self.lr_scheduler], self.accelerator.scaler

    def _folder_of_newest(self) -> str | None:
        """Return a folder with the Trainer's state from the newest step; None if there is no step."""
        state = {"trainer": ""}
        self._resumed_step = self._manager.restore(state)
        if self._resumed_step is None:
            logger.info("No step was committed yet: training starts from the beginning")
            return None
        folder = Path(self.args.output_dir) / f"checkpoint-{self._resumed_step}"
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / TRAINER_STATE_NAME).write_text(state["trainer"])
        self.accelerator.wait_for_everyone()
        return str(folder)


def save_state(accelerator: Any, manager: Manager, step: int) -> SaveHandle:
    """Save, in the background and as `step`, whatever an Accelerator has prepared or registered.

    Collective, like `accelerator.save_state`.
    """
    return manager.save_async(step, _state_of_accelerator(accelerator))


def load_state(
    accelerator: Any, manager: Manager, *, step: int | None = None, trust: bool = False
) -> int | None:
    """Restore the newest step, or `step`, into whatever an Accelerator has prepared or registered.

    Also restores the states of the random number generators. Returns the step, or None if none was ever
    committed. `trust` allows objects of any class, whose code may run during the load. Collective.
    """
    state = _state_of_accelerator(accelerator)
    restored_step = manager.restore(state, step=step, trust=trust)
    if restored_step is None:
        return None
    _restore_parts(state, *_parts_of(accelerator))
    for registered, values in zip(accelerator._custom_objects, state["registered"], strict=True):  # noqa: SLF001 - as below
        registered.load_state_dict(values)
    set_random_state(state["noise"])
    accelerator.step = state["step"]
    return restored_step


_Parts = tuple[Sequence[Any], Sequence[Any], Sequence[Any], Any]
"""Models, optimizers, schedulers and the scaler. The n-th optimizer belongs to the n-th model."""


def _parts_of(accelerator: Any) -> _Parts:
    # Accelerate has no public list of what it has prepared.
    prepared = (accelerator._models, accelerator._optimizers, accelerator._schedulers)  # noqa: SLF001 - as above
    return *prepared, accelerator.scaler


def _state_of_accelerator(accelerator: Any) -> dict[str, Any]:
    registered = [each.state_dict() for each in accelerator._custom_objects]  # noqa: SLF001 - see above
    return {**_state_of(*_parts_of(accelerator)), "registered": registered, "step": accelerator.step}


def _state_of(
    models: Sequence[Any], optimizers: Sequence[Any], schedulers: Sequence[Any], scaler: Any
) -> dict[str, Any]:
    """Return the state to save or to restore into. As a side effect, every optimizer's state is created."""
    if len(optimizers) > len(models):
        raise UsageError(
            f"There are {len(optimizers)} optimizers for {len(models)} models",
            fix="Prepare one optimizer for each model, in the same order.",
        )
    pairs = [get_state_dict(model, _own(optimizers, number)) for number, model in enumerate(models)]
    return {
        "model": [weights for weights, _ in pairs],
        "optimizer": [steps for _, steps in pairs],
        "scheduler": [each.state_dict() for each in schedulers],
        "scaler": None if scaler is None else scaler.state_dict(),
        "noise": get_random_state(),
    }


def _restore_parts(
    state: Mapping[str, Any],
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    scaler: Any,
) -> None:
    for number, model in enumerate(models):
        set_state_dict(
            model,
            _own(optimizers, number),
            model_state_dict=state["model"][number],
            optim_state_dict=state["optimizer"][number],
        )
    for scheduler, values in zip(schedulers, state["scheduler"], strict=True):
        scheduler.load_state_dict(values)
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])


def _own(optimizers: Sequence[Any], number: int) -> list[torch.optim.Optimizer]:
    """Return a list with model `number`'s optimizer, without Accelerate's wrapper; empty if it has none."""
    return [getattr(each, "optimizer", each) for each in optimizers[number : number + 1]]


def get_random_state() -> tuple[Any, ...]:
    """Return the state of this rank's random number generators as one object, saved for each rank."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 - users draw from it
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return (
        random.getstate(),
        (kind, np.asarray(keys).tolist(), position, has_gauss, gauss),
        bytes(torch.get_rng_state().numpy()),
        tuple(bytes(each.numpy()) for each in devices),
    )


def set_random_state(saved: tuple[Any, ...]) -> None:
    python, (kind, keys, *rest), host, devices = saved
    random.setstate(python)
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002 - likewise
    torch.set_rng_state(torch.frombuffer(bytearray(host), dtype=torch.uint8))
    if devices and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(
            [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in devices]
        )
