"""What stands out in a training run: each trouble in a sentence, with its figures, and what to do about it.

Pure. The gravest comes first: a figure that is not the storage's, then what costs the most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.results.io_reconciliation import IoReconciliation, ReconciliationVerdict
from penstock.results.phase_figures import STRAGGLER, TimeBreakdown
from penstock.results.run_facts import Trouble
from penstock.results.step_series import RunSteps, WaitShift
from penstock.units import format_bytes, format_seconds

BUSY: Final = 0.85
"""Readers, and processors, that are busy for this share of the time are all that there is."""
LEAST_WAIT: Final = 0.02
"""Waits of a smaller share of a step's time are no trouble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEvidence:
    """What a run has recorded, as far as it says something about trouble; None is not known."""

    steps: RunSteps
    times: TimeBreakdown | None
    shift: WaitShift | None
    deliveries: Sequence[IoReconciliation]
    loader: dict[str, Any]
    evictions: Sequence[dict[str, Any]]
    ceiling_au_percent: float | None
    asked_au_percent: float
    cpu_busy_share: float | None
    storage_uri: str
    passed: bool

    @property
    def readers(self) -> int:
        """Reading threads or processes of a rank; 0 where nothing says how many."""
        return int(self.loader.get("threads") or self.loader.get("workers") or 0)

    def readers_busy_share(self) -> float | None:
        """The share of the run's time in which the readers of an average rank read or decoded."""
        if not self.readers:
            return None
        worked = sum(
            int((rank.steps["read_ns"] + rank.steps["decode_ns"]).sum()) for rank in self.steps.ranks
        )
        spent = sum(
            int((rank.steps["barrier_ns"] - rank.steps["start_ns"]).sum()) for rank in self.steps.ranks
        )
        return worked / (self.readers * spent) if spent else None


def find_troubles(evidence: TrainingEvidence) -> list[Trouble]:
    """All that stands out."""
    of_one, of_all = list(_slow_rank(evidence)), list(_too_few_readers(evidence))
    return [
        *_from_memory(evidence),
        *_client_too_slow(evidence),
        *([*of_all, *of_one] if _all_wait(evidence) else [*of_one, *of_all]),
        *_slower_from_then_on(evidence),
        *_no_processor_left(evidence),
    ]


def _all_wait(evidence: TrainingEvidence) -> bool:
    """Whether the fastest rank waits longer than the slowest rank waits beyond that."""
    if evidence.times is None:
        return False
    waits = evidence.times.skew["wait"]
    return waits.fastest_s > waits.slowest_s - waits.fastest_s


def _from_memory(evidence: TrainingEvidence) -> Iterator[Trouble]:
    to_do = (
        "Read past the page cache (direct://...), or use a data set several times as large as the memory of "
        "all hosts."
    )
    for delivery in evidence.deliveries:
        if delivery.direction == "read" and delivery.verdict is ReconciliationVerdict.FAIL:
            delivered, asked = delivery.delivered_bytes or 0, delivery.application_bytes
            share = 1 - delivered / asked
            says = (
                f"The page cache served {share:.0%} of what was read: devices and networks delivered "
                f"{format_bytes(delivered)} of {format_bytes(asked)}. This is not the storage's speed."
            )
            yield Trouble("page cache", says, to_do)
            return
    warm = [stage for stage in evidence.evictions if stage.get("resident_share", 0.0) > LEAST_WAIT]
    if warm:
        share = max(stage["resident_share"] for stage in warm)
        says = f"Up to {share:.0%} of the data set stayed in the page cache before an epoch."
        yield Trouble("page cache", says, to_do)


def _client_too_slow(evidence: TrainingEvidence) -> Iterator[Trouble]:
    ceiling = evidence.ceiling_au_percent
    if ceiling is not None and ceiling < evidence.asked_au_percent:
        yield Trouble(
            "client",
            f"On storage that costs nothing this client reaches AU {ceiling:.1f} %: no storage can give it "
            f"{evidence.asked_au_percent:.0f} %.",
            "Use fewer ranks for each host, or hosts with more or faster cores.",
        )


def _slow_rank(evidence: TrainingEvidence) -> Iterator[Trouble]:
    times = evidence.times
    if times is None or len(evidence.steps.ranks) < 2:
        return
    hosts = {rank.rank: rank.host for rank in evidence.steps.ranks}
    step_s = sum(times.over_ranks[part].mean_s for part in ("wait", "compute", "barrier"))
    for measure, does in (("wait", "waits for samples"), ("compute", "computes")):
        skew = times.skew[measure]
        more_s = skew.slowest_s - skew.median_s
        # Of two ranks the median is halfway to the slowest.
        usual_s = skew.fastest_s if len(evidence.steps.ranks) == 2 else skew.median_s
        if skew.slowest_s >= STRAGGLER * usual_s and more_s >= LEAST_WAIT * step_s:
            yield Trouble(
                "slow rank",
                f"Rank {skew.slowest_rank} on {hosts.get(skew.slowest_rank, 'its host')} {does} "
                f"{format_seconds(skew.slowest_s)} a step, the usual rank {format_seconds(usual_s)}: "
                "all others wait for it.",
                f"Look at rank {skew.slowest_rank}'s path to storage and what else its host does, or leave "
                "the host out.",
            )
            return


def _slower_from_then_on(evidence: TrainingEvidence) -> Iterator[Trouble]:
    shift = evidence.shift
    if shift is None or shift.after_s <= shift.before_s:
        return
    yield Trouble(
        "slower",
        f"From {format_seconds(shift.at_s)} on (epoch {shift.epoch}, step {shift.step}) a step waits "
        f"{format_seconds(shift.after_s)} for samples instead of {format_seconds(shift.before_s)}.",
        "Look at what else used the storage then: other jobs, a rebuild, a full cache or write buffer.",
    )


def _too_few_readers(evidence: TrainingEvidence) -> Iterator[Trouble]:
    busy = evidence.readers_busy_share()
    if busy is None or busy < BUSY or evidence.times is None:
        return
    if evidence.times.shares.wait + evidence.times.shares.held_up < LEAST_WAIT:
        return
    readers = evidence.readers
    named = "The only reader of each rank was" if readers == 1 else f"All {readers} readers of each rank were"
    yield Trouble(
        "readers",
        f"{named} busy {min(busy, 1.0):.0%} of the time: the storage is never asked for more at once.",
        f"Raise reader.read_threads ({readers} now) until AU stops rising; `penstock storage probe "
        f"{evidence.storage_uri}` says whether the storage has more to give.",
    )


def _no_processor_left(evidence: TrainingEvidence) -> Iterator[Trouble]:
    share, times = evidence.cpu_busy_share, evidence.times
    if (
        times is None
        or times.shares.wait + times.shares.held_up > times.shares.barrier + times.shares.harness
    ):
        return
    # The emulated computation keeps cores busy, too: that is trouble only where it is what ranks wait for.
    if share is not None and share >= BUSY and not evidence.passed:
        yield Trouble(
            "processors",
            f"The hosts' processors were busy {share:.0%} of the time.",
            "Use fewer ranks for each host, or hosts with more cores.",
        )


def mean_or_none(values: Sequence[float] | np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    """The mean of what was counted; None of nothing."""
    known = np.asarray(values)[~np.isnan(values)]
    return float(known.mean()) if known.size else None
