"""Folders of runs with known troubles: each has the files that a real run leaves, told by a short script.

A training run here is four ranks on two hosts, two epochs, and steps that compute 100 ms. A checkpoint run
wrote and read two checkpoints, in a second each where nothing else is said.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.run_events import RankScript

from penstock.results.active_run import ActiveRun
from penstock.results.checkpoint_files import MovedBytes, Throughput, write_throughput
from penstock.results.counter_files import IoReconciliation, ReconciliationVerdict
from penstock.results.event_files import write_tables
from penstock.results.phase_figures import compute_phase_figures
from penstock.results.provenance import HostFacts
from penstock.results.run_record import RunRequest
from penstock.results.step_events import RankEvents
from penstock.workload.load_workload import load
from penstock.workload.settings import parse_settings

RANKS: Final = 4
STEPS: Final = 40
COMPUTE_S: Final = 0.1
MIB: Final = 2**20

Waits = Callable[[int, int, int], float]
"""How long a rank waits in an epoch's step: rank, epoch, step -> seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStory:
    """What happened in a run; `read_share` is how much of a step its readers read for."""

    waits: Waits = lambda _rank, _epoch, _step: 0.002
    threads: int = 4
    read_share: float = 0.2
    decode_share: float = 0.0
    delivered_share: float = 1.0
    ceiling_percent: float = 98.5


def record_training(parent: Path, story: TrainingStory) -> Path:
    """The folder of a finished run that went like `story`, with its page."""
    workload = load(
        "unet3d_h100", overrides=parse_settings([f"dataset.num_files_train={RANKS * STEPS * 7}"])
    ).workload
    events = [_tell(rank, story) for rank in range(RANKS)]
    read_bytes = sum(int(rank.steps["read_bytes"].sum()) for rank in events)
    delivered = round(read_bytes * story.delivered_share)
    delivery = IoReconciliation(
        direction="read",
        application_bytes=read_bytes,
        delivered_bytes=delivered,
        by={"node1 nvme0n1": delivered},
        verdict=ReconciliationVerdict.FAIL if story.delivered_share < 0.9 else ReconciliationVerdict.PASS,
        why="devices and networks moved less" if story.delivered_share < 0.9 else "all came from devices",
    )
    request = RunRequest(
        workload=workload, ranks=RANKS, hosts=_hosts(), command=["penstock", "training", "run"]
    )
    with ActiveRun.start(parent, request) as run:
        write_tables(run.folder, [rank.clock for rank in events], iter(events))
        (run.folder / "stages.json").write_text(json.dumps(_stages(story)))
        figures = compute_phase_figures(events, workload, ceiling=_stages(story)["ceiling"])
        run.finish(train=figures, deliveries=[delivery])
    return run.folder


def _tell(rank: int, story: TrainingStory) -> RankEvents:
    """Ranks meet after each step: who waited less for samples waits at the barrier."""
    script = RankScript(rank, f"node{rank // 2 + 1}")
    for epoch in (1, 2):
        script.epoch()
        for step in range(1, STEPS + 1):
            waits = [story.waits(other, epoch, step) for other in range(RANKS)]
            took = max(waits) + COMPUTE_S
            script.step(
                waits[rank],
                COMPUTE_S,
                max(waits) - waits[rank],
                samples=7,
                read_bytes=7 * MIB,
                read=took * story.threads * story.read_share,
                decode=took * story.threads * story.decode_share,
            )
        script.end_block()
        script.end_epoch()
    return script.events()


def _stages(story: TrainingStory) -> dict[str, Any]:
    return {
        "loader": {"name": "native", "threads": story.threads, "prefetch_batches": 2},
        "ceiling": {
            "steps": STEPS,
            "au_compat": story.ceiling_percent,
            "compute_share": 0.999,  # decides nothing
            "au_strict": 99.9,
            "samples_per_s": 7 * RANKS / COMPUTE_S,
        },
        "epochs": [{"epoch": epoch, "cache": None, "change_s": 0.1, "preload": None} for epoch in (1, 2)],
        "storage": {"uri": "direct:///mnt/pfs/unet3d"},
    }


def _hosts() -> list[HostFacts]:
    return [
        HostFacts(
            host=f"node{number}", kernel="6.1", machine="x86_64", num_cores=64, memory_bytes=2**39,
            cpuinfo={}, meminfo={},
        )
        for number in (1, 2)
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStory:
    """What happened; `rank_bytes` is what a rank moves in each bucket of a round: direction, step, rank.

    The last bucket of a round lasts `last_s`.
    """

    rank_bytes: Callable[[str, int, int], Sequence[int]] = lambda _direction, _step, _rank: [64 * MIB] * 20
    last_s: float = 0.05
    wrong_bytes: int = 0
    resident_share: float = 0.0


BUCKET_S: Final = 0.05


def record_checkpoints(parent: Path, story: CheckpointStory) -> Path:
    """The folder of a finished run of two checkpoints, with its page."""
    workload = load("unet3d_h100").workload
    request = RunRequest(
        workload=workload,
        ranks=RANKS,
        hosts=_hosts(),
        command=["penstock", "checkpoint", "run"],
        plan={"kind": "checkpoint", "scale": "1/10"},
    )
    with ActiveRun.start(parent, request) as run:
        throughput: Throughput = {}
        rounds, at_s = [], 1_767_225_600.0
        for direction in ("write", "read"):
            for step in (1, 2):
                ranks = [
                    _intervals(story.rank_bytes(direction, step, rank), story.last_s) for rank in range(RANKS)
                ]
                throughput[direction, step] = ranks
                rounds.append(_round(story, direction, step, at_s, ranks))
                at_s = rounds[-1]["ended_at_s"] + 0.5
        write_throughput(run.folder, throughput)
        (run.folder / "checkpoints.json").write_text(json.dumps(_checkpoints(story, rounds)))
        run.finish()
    return run.folder


def _intervals(sizes_bytes: Sequence[int], last_s: float) -> MovedBytes:
    widths_s = [*[BUCKET_S] * (len(sizes_bytes) - 1), last_s]
    return [
        (number * BUCKET_S, width_s, size_bytes)
        for number, (width_s, size_bytes) in enumerate(zip(widths_s, sizes_bytes, strict=True))
    ]


def _round(
    story: CheckpointStory, direction: str, step: int, at_s: float, ranks: Sequence[MovedBytes]
) -> dict[str, Any]:
    moved = sum(size_bytes for intervals in ranks for _, _, size_bytes in intervals)
    took_s = max(begin_s + width_s for intervals in ranks for begin_s, width_s, _ in intervals)
    is_read = direction == "read"
    cold = {"path": "page cache dropped", "resident_share": story.resident_share} if is_read else None
    wrong = [{"key": "epoch1_step1/0.distcp", "offset": 4096}] if is_read and story.wrong_bytes else []
    return {
        "direction": direction, "number": step, "step": step, "began_at_s": at_s, "ended_at_s": at_s + took_s,
        "from_memory": is_read and story.resident_share > 0.01, "cold": cold, "wrong": wrong,
        "moved_bytes": moved, "verified_bytes": moved if is_read else 0, "wrong_bytes": len(wrong),
        "duration_s": took_s, "gib_per_s": moved / 2**30 / took_s, "min_gib_per_s": 0.5, "slowest_rank": 0,
        "setup_s": 0.05, "pipeline_s": took_s - 0.1, "drain_s": 0.1, "p50_ms": 10.0, "p99_ms": 30.0,
        "bottleneck": "storage",
    }  # fmt: skip


def _checkpoints(story: CheckpointStory, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def total(direction: str) -> dict[str, Any]:
        own = [one for one in rounds if one["direction"] == direction]
        num_bytes, took_s = sum(one["moved_bytes"] for one in own), sum(one["duration_s"] for one in own)
        rate = num_bytes / 2**30 / took_s
        return {
            "checkpoints": 2, "bytes": num_bytes, "duration_s": took_s, "gib_per_s": rate,
            "mean_gib_per_s": rate, "p99_ms": 30.0, "bottleneck": "storage",
        }  # fmt: skip

    return {
        "format": 1, "model": "llama3-8b", "target": "direct:///mnt/pfs/ckpt",
        "checkpoint_bytes": rounds[0]["moved_bytes"], "write": total("write"), "read": total("read"),
        "bottleneck": "storage", "is_right": not story.wrong_bytes, "gap_s": 0.5, "checkpoints": rounds,
    }  # fmt: skip
