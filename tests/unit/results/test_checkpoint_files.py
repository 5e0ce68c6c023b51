"""`checkpoints.json` read back, and what lists of runs show of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageError
from penstock.results.checkpoint_files import (
    read_checkpoints,
    read_throughput,
    summarize_checkpoints,
    write_throughput,
)

DIRECTION = {
    "checkpoints": 2, "bytes": 2048, "duration_s": 0.5, "gib_per_s": 1.5, "mean_gib_per_s": 1.6,
    "p99_ms": 3.0, "bottleneck": "storage", "streams": [{"rank": 0}],
}  # fmt: skip
DOCUMENT = {
    "format": 1, "model": "llama3-8b", "target": "file:///ckpt", "checkpoint_bytes": 1024, "write": DIRECTION,
    "read": None, "bottleneck": "storage", "is_right": True, "gap_s": None, "checkpoints": [],
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    (folder / "checkpoints.json").write_text(json.dumps(DOCUMENT | changes))
    return folder


def test_checkpoint_figures_are_read_back(tmp_path: Path) -> None:
    found = read_checkpoints(written(tmp_path, read=DIRECTION | {"gib_per_s": None}))
    assert found is not None
    assert (found["model"], found["write"]["gib_per_s"], found["read"]["gib_per_s"]) == (
        "llama3-8b",
        1.5,
        None,
    )
    assert "streams" not in summarize_checkpoints(found)["write"]


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert read_checkpoints(tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "format 2, not 1"),
        ({"write": {"bytes": "many"}}, "not as Penstock writes it: write"),
        ({"model": None}, "not as Penstock writes it: model"),
    ],
)
def test_another_file_is_refused_with_its_place(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(StorageError, match=said):
        read_checkpoints(written(tmp_path, **changes))


def test_invalid_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints.json").write_text("[1")
    with pytest.raises(StorageError, match="Cannot read this run"):
        read_checkpoints(tmp_path)


def test_throughput_comes_back_rank_by_rank(tmp_path: Path) -> None:
    assert read_throughput(tmp_path) == {}
    ranks = [[(0.0, 0.05, 1), (0.1, 0.02, 3)], [(0.1, 0.07, 2)]]
    rounds = {("write", 1): ranks, ("read", 1): ranks[::-1]}
    write_throughput(tmp_path, rounds)
    assert read_throughput(tmp_path) == rounds


def test_a_damaged_table_of_throughput_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "throughput.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(StorageError, match="Cannot read the moved bytes"):
        read_throughput(tmp_path)
