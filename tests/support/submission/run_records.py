"""What `run.json` says of the order of samples, for generated trees: computed by the rule's own words."""

from functools import cache
from typing import Any, Final

_WORD: Final = 1 << 64


def run_record(*, num_samples: int, num_ranks: int, num_epochs: int) -> dict[str, Any]:
    """A record whose epochs deal out every sample once, otherwise in each epoch."""
    return {
        "format": 2,
        "name": "unet3d",
        "outcome": "finished",
        "workload": {
            "dataset": {"num_files_train": num_samples, "num_samples_per_file": 1},
            "reader": {"file_shuffle": "seed", "sample_shuffle": "seed"},
            "train": {"seed_change_epoch": True},
        },
        "plan": {
            "item_samples": 1,
            "block_samples": 1,
            "window_samples": 0,
            "division": "rotate",
            "shuffle": "seed",
            "epochs": [_epoch(number, num_samples, num_ranks) for number in range(1, num_epochs + 1)],
        },
    }


def _epoch(epoch: int, num_samples: int, num_ranks: int) -> dict[str, Any]:
    """Ranks take turns; from epoch to epoch another rank has the first turn, and two swap a sample."""
    ranks = [range(rank, num_samples, num_ranks) for rank in range(num_ranks)]
    digests = [_digest(items) for items in ranks]
    swapped = _item(epoch * num_ranks) - _item(epoch * num_ranks + num_ranks - 1)
    digests[0], digests[-1] = (digests[0] - swapped) % _WORD, (digests[-1] + swapped) % _WORD
    return {
        "epoch": epoch,
        "steps": 500,
        "steps_without_limit": 500,
        "left_out": {"samples": 0, "digest": f"{0:016x}"},
        "ranks": [
            {"samples": len(items), "digest": f"{digest:016x}"}
            for items, digest in zip(ranks, digests, strict=True)
        ],
    }


@cache
def _digest(items: range) -> int:
    return sum(map(_item, items)) % _WORD


def _item(number: int) -> int:
    return _mix((_mix(number) + 1) % _WORD)


def _mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % _WORD
    return word ^ word >> 31
