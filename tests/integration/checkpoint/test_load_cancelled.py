"""Loads on several ranks that are ended by Ctrl-C or a failing callback on one: they end soon on all."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.gloo_ranks import on_gloo_ranks

from penstock.checkpoint.api import load, save
from penstock.checkpoint.loader import INTERRUPTED
from penstock.errors import PenstockError
from penstock.progress import Progress

Told = dict[str, list[Any]]
NUM_TENSORS = 12
TENSOR_BYTES = 2 << 20


class AtFirstBlock(Progress):
    """Does something on the last rank when its first block has come, then counts."""

    def __init__(self, act: Any) -> None:
        self._act = act
        self._lock = threading.Lock()
        self.num_blocks = 0

    def advance(self, amount: float) -> None:
        with self._lock:
            self.num_blocks += 1
            is_first = self.num_blocks == 1
        if is_first and dist.get_rank() == dist.get_world_size() - 1:
            self._act()


def outcome(root: Path, act: Any) -> dict[str, Any]:
    """How a load into replicas ends here, how much of it was done, and whether the next one works."""
    state = {f"w{number}": torch.zeros(TENSOR_BYTES // 4) for number in range(NUM_TENSORS)}
    progress = AtFirstBlock(act)
    error: BaseException | None = None
    try:
        load(state, root / "step", progress=progress)
    except (PenstockError, KeyboardInterrupt) as raised:
        error = raised
        if dist.get_rank() == 0:
            (root / "rank0-ended").touch()
    # Nothing that was under way disturbs what comes next.
    load(state, root / "step")
    assert all(tensor.eq(number).all() for number, tensor in enumerate(state.values()))
    return {"kind": type(error).__name__, "text": str(error), "blocks": progress.num_blocks}


def interrupted(rank: int, root: Path) -> dict[str, Any]:
    # Shells start background jobs with SIGINT ignored, and Python leaves it so: Ctrl-C would do nothing here.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        # This thread reads no more until the other rank's load has ended, however busy the machine is.
        give_up_s = time.monotonic() + 60
        while not (root / "rank0-ended").exists() and time.monotonic() < give_up_s:
            time.sleep(0.01)

    return outcome(root, interrupt)


def raising(rank: int, root: Path) -> dict[str, Any]:
    def fail() -> None:
        raise RuntimeError("the progress bar broke")

    return outcome(root, fail)


def programs(rank: int, root: Path) -> dict[str, Any]:
    state = {f"w{number}": torch.full((TENSOR_BYTES // 4,), float(number)) for number in range(NUM_TENSORS)}
    save(state, root / "step")
    return {"interrupted": interrupted(rank, root), "raising": raising(rank, root)}


def killed(rank: int, root: Path) -> None:
    state = {f"w{number}": torch.full((TENSOR_BYTES // 4,), float(number)) for number in range(NUM_TENSORS)}
    save(state, root / "step")
    began_s = time.monotonic()
    with pytest.raises(PenstockError) as caught:
        load(state, root / "step", progress=AtFirstBlock(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    took_s = time.monotonic() - began_s
    (root / f"told{rank}").write_text(f"{took_s} {caught.value}", encoding="utf-8")


def test_a_rank_killed_while_it_shares_what_it_reads_is_named_soon(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="child 2: it was killed"):
        on_gloo_ranks(3, killed, tmp_path)
    for rank in (0, 1):
        took_s, told = (tmp_path / f"told{rank}").read_text(encoding="utf-8").split(" ", 1)
        assert "Rank 2 ended while" in told
        assert float(took_s) < 10


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_gloo_ranks(2, programs, tmp_path_factory.mktemp("cancelled"))


def test_an_interrupt_on_one_rank_ends_the_load_on_all_ranks(
    told: list[dict[str, Any]],
) -> None:
    first, last = (each["interrupted"] for each in told)
    assert last["kind"] == "KeyboardInterrupt"
    assert first["kind"] == "RankFailed"
    assert "Rank 1" in first["text"]
    assert INTERRUPTED in first["text"]


def test_a_progress_callback_that_raises_ends_the_load_on_all_ranks(told: list[dict[str, Any]]) -> None:
    for each in (rank["raising"] for rank in told):
        assert each["kind"] == "RankFailed"
        assert "Rank 1" in each["text"]
        assert "the progress bar broke" in each["text"]
