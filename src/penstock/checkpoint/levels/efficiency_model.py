"""The efficiency of checkpointing strategies: the share of time left for training, computed and simulated.

A strategy has one cost that training waits for, and for each kind of failure the age of what can be restored
and the time to restore it. Pure: the simulation draws from the generator it is given. Invariant: formula and
simulation read the same `Strategy`, so if they disagree, the assumptions of the formula do not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.manager.save_policy import daly_interval_s

if TYPE_CHECKING:
    import numpy as np

TRUSTED_DIFFERENCE: Final = 0.02
"""Formula and simulation agree if their shares of time differ by no more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMode:
    """One kind of failure under one strategy."""

    name: str
    mtbf_s: float
    """Mean time between failures of this kind, in the whole job."""
    every: int
    """Every N-th checkpoint survives it."""
    latency_s: float
    """How long after a checkpoint it begins to survive it: parity and flush run in the background."""
    recovery_s: float
    """From the failure until training continues."""
    restored_from: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One strategy of checkpointing."""

    name: str
    blocked_s: float
    """The time that training waits at each checkpoint."""
    failures: tuple[FailureMode, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The expected efficiency of a strategy at one interval."""

    strategy: Strategy
    interval_s: float
    """Training between two checkpoints."""
    efficiency: float
    """By the formula: useful time over all time."""
    simulated: float
    num_failures: int
    """How many failures the simulation drew."""

    @property
    def agrees(self) -> bool:
        """Whether the simulation confirms the formula."""
        return abs(self.efficiency - self.simulated) <= TRUSTED_DIFFERENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine and the job. Bandwidths are bytes per second."""

    state_bytes: int
    nodes: int
    fast_bytes_per_s: float
    """Of one node's cache."""
    slow_bytes_per_s: float
    """Of the durable storage, for all nodes together."""
    network_bytes_per_s: float
    """Of one node."""
    restart_s: float
    process_mtbf_s: float
    """Of the whole job: processes that die while their hosts stay up."""
    node_mtbf_s: float
    """Of one node."""
    system_mtbf_s: float
    """Of failures of several nodes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """How a cache is protected; see `options.Scheme`."""

    name: str
    losses: int
    kept_share: float
    """Bytes kept by each member over its own."""
    group: int


def build_strategies(machine: Machine, protection: Protection, *, flush_every: int) -> tuple[Strategy, ...]:
    """The strategies to compare: durable at once, a cache with a flush, a protected cache with a flush."""
    cached = machine.state_bytes / machine.nodes / machine.fast_bytes_per_s
    durable = machine.state_bytes / machine.slow_bytes_per_s
    direct = Strategy(
        name="durable, each time",
        blocked_s=durable,
        failures=_failures(machine, {}, every=1, latency_s=0.0, durable_s=durable),
    )
    local = {"process": (0.0, cached, "cache")}
    single = Strategy(
        name=f"cache, flushed every {flush_every}",
        blocked_s=cached,
        failures=_failures(machine, local, every=flush_every, latency_s=durable, durable_s=durable),
        warnings=_warnings(machine, cached, durable),
    )
    own_bytes = machine.state_bytes / machine.nodes
    sent_bytes = own_bytes * protection.losses
    encoding_s = own_bytes / machine.fast_bytes_per_s + sent_bytes / machine.network_bytes_per_s
    rebuilding_s = cached + own_bytes * max(protection.group - 1, 1) / machine.network_bytes_per_s
    guarded = {**local, "node": (encoding_s, rebuilding_s, f"{protection.name}, rebuilt")}
    protected = Strategy(
        name=f"cache with {protection.name}, flushed every {flush_every}",
        blocked_s=cached,
        failures=_failures(machine, guarded, every=flush_every, latency_s=durable, durable_s=durable),
        warnings=_warnings(machine, cached, durable),
    )
    return (direct, single) if not protection.losses else (direct, single, protected)


def _failures(
    machine: Machine,
    cached: dict[str, tuple[float, float, str]],
    *,
    every: int,
    latency_s: float,
    durable_s: float,
) -> tuple[FailureMode, ...]:
    mtbf_s = {
        "process": machine.process_mtbf_s,
        "node": machine.node_mtbf_s / machine.nodes,
        "system": machine.system_mtbf_s,
    }
    failures = []
    for name, apart_s in mtbf_s.items():
        if not math.isfinite(apart_s):
            continue
        late_s, load_s, source = cached.get(name, (latency_s, durable_s, "durable"))
        failures.append(
            FailureMode(
                name=name,
                mtbf_s=apart_s,
                every=1 if name in cached else every,
                latency_s=late_s,
                recovery_s=machine.restart_s + load_s,
                restored_from=source,
            )
        )
    return tuple(failures)


def _warnings(machine: Machine, cached_s: float, durable_s: float) -> tuple[str, ...]:
    if cached_s < durable_s:
        return ()
    cached = f"{machine.nodes} nodes write a checkpoint to it in {cached_s:,.1f} s"
    return (f"the cache does not pay off: {cached}, and to the durable storage in {durable_s:,.1f} s",)


def efficiency(strategy: Strategy, interval_s: float) -> float:
    """The share of useful time, to the first order in failures: each costs half a period and a recovery.

    A failure of a kind that only every k-th checkpoint survives costs half of k periods, and what it takes
    until a checkpoint survives it.
    """
    period_s = interval_s + strategy.blocked_s
    lost = sum(
        (failure.recovery_s + failure.latency_s + failure.every * period_s / 2) / failure.mtbf_s
        for failure in strategy.failures
    )
    return interval_s / period_s / (1 + lost)


def best_interval_s(strategy: Strategy) -> float:
    """The interval of the highest efficiency; Daly's, where one kind of failure is all there is."""
    if not strategy.failures:
        return math.inf
    rate = sum(failure.every / failure.mtbf_s for failure in strategy.failures)
    guess = max(daly_interval_s(strategy.blocked_s, 1 / rate), 1e-3)
    candidates = [guess * 2 ** (step / 16) for step in range(-64, 65)]
    return max(candidates, key=lambda interval_s: efficiency(strategy, interval_s))


def simulate(
    strategy: Strategy, interval_s: float, *, random: np.random.Generator, num_failures: int = 4000
) -> float:
    """The share of useful time in a simulation of random failures, one after another."""
    if not strategy.failures:
        return interval_s / (interval_s + strategy.blocked_s)
    period_s = interval_s + strategy.blocked_s
    rates = [1 / failure.mtbf_s for failure in strategy.failures]
    waits = random.exponential(1 / sum(rates), num_failures)
    kinds = random.choice(len(rates), num_failures, p=[rate / sum(rates) for rate in rates])
    reached, elapsed_s = 0, 0.0
    # Checkpoints are numbered; `reached` is the one that the last failure left to restart from.
    for wait_s, kind in zip(waits.tolist(), kinds.tolist(), strict=True):
        failure = strategy.failures[kind]
        taken = int(wait_s // period_s)
        settled = max(int((wait_s - failure.latency_s) // period_s), 0)
        newest = reached + min(taken, settled)
        reached = newest // failure.every * failure.every
        elapsed_s += wait_s + failure.recovery_s
    return min(reached * interval_s / elapsed_s, 1.0)


def predict(strategy: Strategy, interval_s: float, *, random: np.random.Generator) -> Prediction:
    """The prediction of formula and simulation."""
    return Prediction(
        strategy=strategy,
        interval_s=interval_s,
        efficiency=efficiency(strategy, interval_s),
        simulated=simulate(strategy, interval_s, random=random),
        num_failures=4000 if strategy.failures else 0,
    )


def predict_all(
    strategies: Sequence[Strategy], *, interval_s: float | None, random: np.random.Generator
) -> list[Prediction]:
    """The prediction for each strategy, at one interval or each at its best."""
    predictions = [
        predict(strategy, interval_s or best_interval_s(strategy), random=random) for strategy in strategies
    ]
    direct, *cached = predictions
    return [direct, *(_add_warning(prediction, direct) for prediction in cached)]


def _add_warning(prediction: Prediction, direct: Prediction) -> Prediction:
    if prediction.efficiency > direct.efficiency:
        return prediction
    share, better = f"{prediction.efficiency:.1%}", f"{direct.efficiency:.1%}"
    warning = f"leaves {share} of the time for training, {direct.strategy.name!r} {better}"
    return replace(
        prediction, strategy=replace(prediction.strategy, warnings=(*prediction.strategy.warnings, warning))
    )
