"""The efficiency of checkpointing strategies: the share of time left for training, computed and simulated.

A strategy has one cost: the time that training waits. For each kind of failure it has the age of the
checkpoint that can be restored, and the time to restore it. Pure: the simulation draws from the generator it
is given. Invariant: formula and simulation read the same `Strategy`, so if they disagree, the formula's
assumptions do not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.levels.options import Scheme

if TYPE_CHECKING:
    import numpy as np

NUM_FAILURES: Final = 4000
"""The number of failures that a simulation draws."""
RESTART_S: Final = 120.0
"""The time from a failure until loading begins; the same for every strategy."""
TRUSTED_DIFFERENCE: Final = 0.02
"""Formula and simulation agree if their shares of time differ by no more than this part of the larger one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMode:
    """One kind of failure under one strategy."""

    name: str
    mtbf_s: float
    """The mean time between failures of this kind anywhere in the job."""
    every: int
    """Only every N-th checkpoint survives a failure of this kind."""
    latency_s: float
    """The time until a new checkpoint survives such a failure: parity and flush run in the background."""
    recovery_s: float
    """The time from the failure until training continues."""
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
    """The training time between two checkpoints."""
    efficiency: float
    """Useful time divided by total time, according to the formula."""
    simulated: float

    @property
    def agrees(self) -> bool:
        """True if the simulation confirms the formula."""
        return math.isclose(self.efficiency, self.simulated, rel_tol=TRUSTED_DIFFERENCE)

    @property
    def trusted(self) -> float:
        """The efficiency by which strategies are compared: the simulated one if the formula does not hold."""
        return self.efficiency if self.agrees else self.simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine and the job. Bandwidths are in bytes per second."""

    state_bytes: int
    nodes: int
    fast_bytes_per_s: float
    """The bandwidth of one node's cache."""
    slow_bytes_per_s: float
    """The bandwidth of the durable storage, for all nodes together."""
    network_bytes_per_s: float
    """The network bandwidth of one node."""
    node_mtbf_s: float
    """The mean time between failures of one node."""
    system_mtbf_s: float | None
    """The mean time between failures of several nodes at once; None if there are none."""


def build_strategies(machine: Machine, scheme: Scheme, *, flush_every: int) -> tuple[Strategy, ...]:
    """Return the strategies to compare: durable at once, a flushed cache, a cache protected by `scheme`."""
    own_bytes = machine.state_bytes / machine.nodes
    cached_s = own_bytes / machine.fast_bytes_per_s
    durable_s = machine.state_bytes / machine.slow_bytes_per_s
    encoding_s = cached_s + own_bytes * scheme.losses / machine.network_bytes_per_s
    rebuilding_s = cached_s + own_bytes * max(scheme.group - 1, 1) / machine.network_bytes_per_s
    mtbf_s = {"node": machine.node_mtbf_s / machine.nodes}
    if machine.system_mtbf_s is not None:
        mtbf_s["system"] = machine.system_mtbf_s
    flushed = f"flushed every {flush_every}"
    plans = [
        ("durable, each time", durable_s, 1),
        (f"cache, {flushed}", cached_s, flush_every),
        (f"cache with {scheme.name}, {flushed}", cached_s, flush_every),
    ]
    strategies = []
    for number, (name, blocked_s, every) in enumerate(plans[: 3 if scheme.losses else 2]):
        is_cached, is_protected = number > 0, number == 2
        failures = [
            FailureMode(
                name=kind,
                mtbf_s=apart_s,
                every=1,
                latency_s=encoding_s,
                recovery_s=RESTART_S + rebuilding_s,
                restored_from=f"{scheme.name}, rebuilt",
            )
            if is_protected and kind == "node"
            else FailureMode(
                name=kind,
                mtbf_s=apart_s,
                every=every,
                latency_s=durable_s if is_cached else 0.0,
                recovery_s=RESTART_S + durable_s,
                restored_from="durable",
            )
            for kind, apart_s in mtbf_s.items()
        ]
        warning = (
            f"the cache does not pay off: {machine.nodes} nodes write a checkpoint to it in {cached_s:,.1f} "
            f"s, and to the durable storage in {durable_s:,.1f} s"
        )
        is_slow = is_cached and cached_s >= durable_s
        strategies.append(
            Strategy(
                name=name,
                blocked_s=blocked_s,
                failures=tuple(failures),
                warnings=(warning,) if is_slow else (),
            )
        )
    return tuple(strategies)


def efficiency(strategy: Strategy, interval_s: float) -> float:
    """Return the share of useful time, to first order in failures: each costs half a period and a recovery.

    A failure that only every k-th checkpoint survives costs half of k periods, plus the time until a
    checkpoint survives it.
    """
    period_s = interval_s + strategy.blocked_s
    lost = sum(
        (failure.recovery_s + failure.latency_s + failure.every * period_s / 2) / failure.mtbf_s
        for failure in strategy.failures
    )
    return interval_s / period_s / (1 + lost)


def best_interval_s(strategy: Strategy) -> float:
    """Return the most efficient interval: the one at which the derivative of `efficiency` is zero."""
    blocked_s, failures = strategy.blocked_s, strategy.failures
    rate = sum(failure.every / failure.mtbf_s for failure in failures)
    fixed = sum((failure.recovery_s + failure.latency_s) / failure.mtbf_s for failure in failures)
    return max(math.sqrt(blocked_s**2 + 2 * blocked_s * (1 + fixed) / rate), 1e-3)


def simulate(
    strategy: Strategy, interval_s: float, *, random: np.random.Generator, num_failures: int = NUM_FAILURES
) -> float:
    """Return the share of useful time in a simulation of random failures, one after another."""
    period_s = interval_s + strategy.blocked_s
    rates = [1 / failure.mtbf_s for failure in strategy.failures]
    waits = random.exponential(1 / sum(rates), num_failures)
    kinds = random.choice(len(rates), num_failures, p=[rate / sum(rates) for rate in rates])
    reached, elapsed_s = 0, 0.0
    # Checkpoints are numbered; `reached` is the one from which the job restarted after the last failure.
    for wait_s, kind in zip(waits.tolist(), kinds.tolist(), strict=True):
        failure = strategy.failures[kind]
        taken = int(wait_s // period_s)
        settled = max(int((wait_s - failure.latency_s) // period_s), 0)
        newest = reached + min(taken, settled)
        reached = newest // failure.every * failure.every
        elapsed_s += wait_s + failure.recovery_s
    return min(reached * interval_s / elapsed_s, 1.0)


def predict(strategy: Strategy, interval_s: float, *, random: np.random.Generator) -> Prediction:
    """Return the efficiency of one strategy at one interval, by formula and by simulation."""
    return Prediction(
        strategy=strategy,
        interval_s=interval_s,
        efficiency=efficiency(strategy, interval_s),
        simulated=simulate(strategy, interval_s, random=random),
    )


def predict_all(strategies: Sequence[Strategy]) -> list[Prediction]:
    """Return a prediction for each strategy at its best interval, all with the same random failures."""
    import numpy as np  # noqa: PLC0415 - slow to import

    random = np.random.default_rng(1)
    predictions = [predict(each, best_interval_s(each), random=random) for each in strategies]
    direct = predictions[0]
    for number, prediction in enumerate(predictions):
        warnings = list(prediction.strategy.warnings)
        if number and prediction.trusted <= direct.trusted:
            warnings.append(
                f"leaves {prediction.trusted:.2%} of the time for training, {direct.strategy.name!r} "
                f"{direct.trusted:.2%}"
            )
        if not prediction.agrees:
            warnings.append(
                f"the simulation gives {prediction.simulated:.2%}, as failures come faster than the formula "
                "assumes; trust the simulation"
            )
        strategy = replace(prediction.strategy, warnings=tuple(warnings))
        predictions[number] = replace(prediction, strategy=strategy)
    return predictions
