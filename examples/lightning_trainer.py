"""Lightning: `ModelCheckpoint` decides when to save, Penstock writes while the training continues.

python lightning_trainer.py run/lightning 2
python lightning_trainer.py run/lightning 4      # continues after epoch 2
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from penstock.checkpoint.adapters.lightning import AsyncPenstockIO


class Regression(lightning.LightningModule):
    """One layer and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        return (self.layer(batch) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, whose moments are in the checkpoint."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(path: str, epochs: int) -> None:
    """Train until `epochs`, from the last checkpoint below `path`."""
    last = Path(path, "last.ckpt")
    trainer = lightning.Trainer(
        max_epochs=epochs,
        plugins=[AsyncPenstockIO()],
        callbacks=[ModelCheckpoint(dirpath=path, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    loader = torch.utils.data.DataLoader(torch.ones(64, 16), batch_size=8)
    trainer.fit(Regression(), loader, ckpt_path=str(last) if last.exists() else None)
    print(f"after epoch {trainer.current_epoch}, step {trainer.global_step}")


main(sys.argv[1], int(sys.argv[2]))
