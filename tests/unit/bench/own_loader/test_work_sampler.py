"""What a sampler tells of threads: all that they computed, though it looks but now and then."""

import inspect
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.own_loader.own_reads import OwnReads
from penstock.bench.own_loader.work_sampler import WorkSampler


def augment(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        sum(range(500))


def test_bursts_stand_for_the_pauses_between_them() -> None:
    found = []
    # On a busy machine a few bursts say little, so it is the usual estimate that must be right.
    for _ in range(3):
        sampler = WorkSampler(lambda: "", own=threading.get_ident(), reads=OwnReads())
        began_s = time.thread_time()
        sampler.start()
        augment(1.5)
        sampler.stop()
        spent_ns = (time.thread_time() - began_s) * 1e9
        found.append((sampler.cpu_ns["transform"] / spent_ns, sampler.spots.total() / spent_ns))
    for shares in zip(*found, strict=True):
        assert statistics.median(shares) == pytest.approx(1.0, rel=0.4)


def test_moments_that_do_not_count_are_left_out() -> None:
    sampler = WorkSampler(lambda: None, own=threading.get_ident(), reads=OwnReads())
    sampler.start()
    augment(0.05)
    sampler.stop()
    assert not sampler.cpu_ns
    assert sampler.num_samples == 0


def test_code_below_a_folder_of_the_package_s_name_is_the_users(tmp_path: Path) -> None:
    module = tmp_path / "penstock" / "steps.py"
    spend: dict[str, Any] = {}
    exec(compile(inspect.getsource(augment), module, "exec"), {"time": time}, spend)
    sampler = WorkSampler(lambda: "", own=threading.get_ident(), reads=OwnReads())
    sampler.start()
    spend["augment"](0.3)
    sampler.stop()
    assert any(str(module) in spot for spot in sampler.spots)
