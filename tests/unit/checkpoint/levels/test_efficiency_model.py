"""What a way of checkpointing leaves for training."""

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.checkpoint.levels.efficiency_model import (
    FailureMode,
    Machine,
    Strategy,
    best_interval_s,
    build_strategies,
    efficiency,
    predict,
    predict_all,
)
from penstock.checkpoint.levels.options import Single, Xor

DAY_S = 86_400.0
MACHINE = Machine(
    state_bytes=912 << 30,
    nodes=64,
    fast_bytes_per_s=3 << 30,
    slow_bytes_per_s=40 << 30,
    network_bytes_per_s=20 << 30,
    node_mtbf_s=200 * DAY_S,
    system_mtbf_s=60 * DAY_S,
)
XOR = Xor(group=8)


def _random() -> np.random.Generator:
    return np.random.default_rng(7)


def _way(**fields: float) -> Strategy:
    given = {"mtbf_s": 10_000.0, "every": 1, "latency_s": 0.0, "recovery_s": 50.0, **fields}
    failure = FailureMode(name="node", restored_from="durable", **given)  # type: ignore[arg-type]
    return Strategy(name="one", blocked_s=10, failures=(failure,))


@pytest.mark.parametrize("fields", [{}, {"every": 5}, {"latency_s": 300}, {"recovery_s": 0}])
def test_the_simulation_confirms_the_formula_where_failures_are_rare(fields: dict[str, float]) -> None:
    strategy = _way(**{"mtbf_s": 100_000.0, **fields})
    found = predict(strategy, 500, random=_random())
    assert found.agrees, (found.efficiency, found.simulated)


def test_failures_that_come_faster_than_checkpoints_make_the_formula_say_so() -> None:
    assert not predict(_way(mtbf_s=200.0, every=4), 500, random=_random()).agrees


def test_the_best_interval_is_better_than_shorter_and_longer_ones() -> None:
    strategy = _way()
    best = best_interval_s(strategy)
    assert efficiency(strategy, best) >= max(efficiency(strategy, best / 2), efficiency(strategy, best * 2))
    assert best == pytest.approx(math.sqrt(2 * 10 * 10_000), rel=0.15)


def test_a_protected_cache_pays_off_on_a_large_job_and_a_bare_one_loses_too_much_with_a_host() -> None:
    direct, single, protected = predict_all(build_strategies(MACHINE, XOR, flush_every=10))
    assert single.efficiency < direct.efficiency < protected.efficiency
    assert direct.strategy.blocked_s == pytest.approx(22.8)
    assert single.strategy.blocked_s == protected.strategy.blocked_s == pytest.approx(4.75)
    assert not any(each.strategy.warnings for each in (direct, protected))


def test_a_cache_that_is_slower_than_the_durable_storage_is_warned_of() -> None:
    slow = replace(MACHINE, fast_bytes_per_s=float(100 << 20))
    _, single, _ = predict_all(build_strategies(slow, XOR, flush_every=10))
    assert any("the cache does not pay" in warning for warning in single.strategy.warnings)
    assert any("of the time for training" in warning for warning in single.strategy.warnings)


def test_without_redundancy_there_are_two_strategies() -> None:
    assert len(build_strategies(MACHINE, Single(), flush_every=10)) == 2
