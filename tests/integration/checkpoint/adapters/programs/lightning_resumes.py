"""Trains with Lightning's Trainer, stops, resumes from what the plugin saved, and prints what came of it."""

from __future__ import annotations

import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402 - after the filter
import torch.distributed as dist  # noqa: E402
from lightning.pytorch import LightningModule, Trainer, seed_everything  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from tests.integration.checkpoint.adapters.programs.ranks import on_forked_ranks  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from penstock.checkpoint.adapters.lightning import AsyncPenstockIO, PenstockIO  # noqa: E402
from penstock.errors import PenstockError  # noqa: E402


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 8})
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, _number: int) -> Any:
        inputs, wanted = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), wanted)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


def trained(folder: Path, epochs: int, plugin: PenstockIO | None, resume: str | None = None) -> Any:
    seed_everything(7)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 4, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    keeping = ModelCheckpoint(dirpath=folder, save_top_k=1, monitor="step", mode="max", every_n_epochs=1)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[keeping],
        plugins=[] if plugin is None else [plugin],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    model = Line()
    trainer.fit(model, loader, ckpt_path=resume)
    return trainer, model, keeping


def same(one: Any, other: Any) -> bool:
    """Whether weights and the optimizer's state are bit for bit the same."""
    weights = zip(one[1].parameters(), other[1].parameters(), strict=True)
    states = [each[0].optimizers[0].state_dict()["state"] for each in (one, other)]
    return all(torch.equal(mine, theirs) for mine, theirs in weights) and all(
        torch.equal(states[0][number][name], states[1][number][name])
        for number in states[0]
        for name in states[0][number]
    )


def is_loaded_by_the_module(model: Line, path: str) -> bool:
    """Whether Lightning's own call, which asks no plugin, brings back the weights."""
    found = Line.load_from_checkpoint(path)
    pairs = zip(model.parameters(), found.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs) and found.hparams == {"width": 8}


def told(folder: Path) -> dict[str, Any]:
    """What happens to an older checkpoint where saving a newer one fails."""
    folder.mkdir()
    plugin = AsyncPenstockIO()
    plugin.save_checkpoint({"weights": torch.ones(3)}, folder / "older")
    (folder / "in the way").write_text("a file of somebody's")
    failure, logged = "", io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(logged))
    plugin.save_checkpoint({"weights": torch.zeros(3)}, folder / "in the way" / "newer")
    plugin.remove_checkpoint(folder / "older")
    try:
        plugin.teardown()
    except PenstockError as error:
        failure = type(error).__name__
    kept = PenstockIO().load_checkpoint(folder / "older")["weights"].tolist()
    return {"failure": failure, "kept": kept, "logged": logged.getvalue()}


def replaced(file: Path) -> dict[str, Any]:
    """What is left where a folder takes the name of one of Lightning's own files."""
    PenstockIO().save_checkpoint({"epoch": 3, "place": torch.ones(2)}, file)
    state = PenstockIO().load_checkpoint(file, map_location="cpu")
    return {"left": sorted(path.name for path in file.parent.iterdir()), "epoch": state["epoch"]}


def rank_0_saves(rank: int, root: Path) -> list[float]:
    """As under DDP: one rank is handed the checkpoint, all of them load it."""
    if rank == 0:
        PenstockIO().save_checkpoint({"weights": torch.ones(3)}, root / "one")
    dist.barrier()
    loaded: list[float] = PenstockIO().load_checkpoint(root / "one")["weights"].tolist()
    return loaded


def main(root: Path) -> None:
    by_rank = on_forked_ranks(2, rank_0_saves, root / "ranks")
    straight = trained(root / "straight", 4, None)
    seen: dict[str, Any] = {"by_rank": by_rank}
    for name, plugin in (("blocking", PenstockIO()), ("background", AsyncPenstockIO())):
        folder = root / name
        first = trained(folder, 2, plugin)
        saved = first[2].best_model_path
        seen[f"{name}_kept"] = sorted(path.name for path in folder.iterdir() if path.suffix == ".ckpt")
        seen[f"{name}_saved"] = Path(saved).name
        seen[f"{name}_module_same"] = is_loaded_by_the_module(first[1], saved)
        by_hand = str(folder / "by hand.ckpt")
        first[0].save_checkpoint(by_hand)
        seen[f"{name}_by_hand_same"] = is_loaded_by_the_module(first[1], by_hand)
        resumed = trained(folder, 4, plugin, saved)
        seen[f"{name}_epochs"] = resumed[0].current_epoch
        seen[f"{name}_same"] = same(straight, resumed)
    own_file = str(trained(root / "own", 2, None)[2].best_model_path)
    seen["own_module_same"] = is_loaded_by_the_module(Line.load_from_checkpoint(own_file), own_file)
    seen["own_file_same"] = same(straight, trained(root / "own file", 4, PenstockIO(), own_file))
    seen |= told(root / "told") | replaced(Path(own_file))
    print(json.dumps(seen))  # noqa: T201 - what the test reads
    AsyncPenstockIO().save_checkpoint({"weights": torch.ones(1 << 22)}, root / "last")
