"""What a run of checkpoints ends with: for its caller, for `checkpoints.json`, and as an exit code.

Invariant: wrong bytes are a failed run whatever its speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.bench.checkpoint.figures import direction_figures, job_bottleneck, plain_counters
from penstock.results.checkpoints import FORMAT_VERSION

if TYPE_CHECKING:
    from penstock.bench.checkpoint.figures import DirectionFigures, RoundFigures
    from penstock.results.delivery import Delivery
    from penstock.storage.base import OptionValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Which earlier run wrote the checkpoints that this one read, and how long ago; by wall clocks."""

    run_folder: str
    kept_steps: tuple[int, ...]

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {"run_folder": self.run_folder, "kept_steps": list(self.kept_steps)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResult:
    """One run. `gap_s` lies between the last byte written, perhaps by another run, and the first read."""

    model: str
    ranks: int
    results_dir: str
    target: str
    total_bytes: int
    seed: int
    rounds: tuple[RoundFigures, ...]
    gap_s: float | None
    earlier: Pairing | None
    shift: int
    storage_options: Mapping[str, OptionValue]
    peak_rss_bytes: tuple[int, ...]
    deliveries: tuple[Delivery, ...] = ()

    @property
    def write(self) -> DirectionFigures | None:
        """All writes."""
        return direction_figures([each for each in self.rounds if each.round.direction == "write"])

    @property
    def read(self) -> DirectionFigures | None:
        """All reads."""
        return direction_figures([each for each in self.rounds if each.round.direction == "read"])

    @property
    def is_right(self) -> bool:
        """Whether every byte that was verified is the one that was written."""
        return all(not each.phase.wrong_bytes for each in self.rounds)

    @property
    def is_from_memory(self) -> bool:
        """Whether the page cache may have served any read."""
        return any(each.is_from_memory for each in self.rounds)

    def document(self) -> dict[str, Any]:
        """As plain data: `write` and `read` are None where there was none."""
        write, read = self.write, self.read
        return {
            "format": FORMAT_VERSION,
            "model": self.model,
            "ranks": self.ranks,
            "target": self.target,
            "checkpoint_bytes": self.total_bytes,
            "seed": self.seed,
            "write": write.document("write") if write else None,
            "read": read.document("read") if read else None,
            "bottleneck": job_bottleneck(self.rounds),
            "is_right": self.is_right,
            "from_memory": self.is_from_memory,
            "gap_s": self.gap_s,
            "earlier": self.earlier.document() if self.earlier else None,
            "recovery_rank_shift": self.shift,
            "storage_options": dict(self.storage_options),
            "storage_counters": plain_counters([each.phase for each in self.rounds]),
            "deliveries": [asdict(each) for each in self.deliveries],
            "peak_rss_bytes": list(self.peak_rss_bytes),
            "checkpoints": [each.document() for each in self.rounds],
            "results_dir": self.results_dir,
        }
