"""Hugging Face's Trainer: weights, optimizer, scheduler and RNG states in one step of the manager.

python hugging_face.py run/hugging-face 20
python hugging_face.py run/hugging-face 40      # continues at step 20, at the next sample
"""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from penstock.checkpoint import Manager
from penstock.checkpoint.adapters.hugging_face import PenstockCheckpoints


class Tuner(PenstockCheckpoints, Trainer):
    """A Trainer whose checkpoints are the manager's."""


def main(path: str, steps: int) -> None:
    """Train a small classifier until `steps`, from the newest step below `path`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, **sizes))
    samples = [{"input_ids": torch.arange(8) + number % 8, "labels": number % 2} for number in range(256)]
    arguments = TrainingArguments(
        output_dir=f"{path}-trainer",
        max_steps=steps,
        save_steps=10,
        per_device_train_batch_size=4,
        report_to=[],
        disable_tqdm=True,
    )
    with Manager(path, keep=2) as manager:
        before = manager.steps()
        trainer = Tuner(model=model, args=arguments, train_dataset=samples, manager=manager)
        trainer.train(resume_from_checkpoint=True)
    print(f"from step {max(before, default=0)} to {trainer.state.global_step}")


main(sys.argv[1], int(sys.argv[2]))
