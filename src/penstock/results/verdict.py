"""What held a run back: storage, the client's CPU, the barrier, or nothing that matters; with the evidence.

Pure: figures in, verdict out. Accelerators are busy enough (`none`) where the threshold's share of all time
was computation; otherwise the largest other share is to blame. A rank whose samples come late holds up all
others in the barrier: that time is storage's or the client CPU's, not the barrier's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.results.times import Shares, Skew, Times

STRAGGLER: Final = 1.5
"""A rank that waits this many times longer than the middle one is named."""


class Bottleneck(StrEnum):
    """What to improve first."""

    STORAGE = "storage"
    CLIENT_CPU = "client CPU"
    BARRIER = "barrier"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The bottleneck, and what it was concluded from, in sentences."""

    bottleneck: Bottleneck
    evidence: tuple[str, ...]


def judge(times: Times, *, threshold: float, ceiling: float | None = None) -> Verdict:
    """The verdict on a run that shall compute for `threshold` (a share) of its time.

    `ceiling` is the share that the same run reached on storage that costs nothing, if that was tried.
    """
    shares = times.shares
    evidence = [_where_time_went(shares, threshold)]
    if ceiling is not None:
        evidence.append(f"On storage that costs nothing the same run computed {ceiling:.1%} of its time.")
    if shares.compute >= threshold:
        return Verdict(bottleneck=Bottleneck.NONE, evidence=tuple(evidence))
    if ceiling is not None and ceiling < threshold:
        evidence.append("So this client cannot reach it with any storage.")
        return Verdict(bottleneck=Bottleneck.CLIENT_CPU, evidence=tuple(evidence))
    bottleneck, reason = _largest(times)
    return Verdict(bottleneck=bottleneck, evidence=(*evidence, reason))


def _where_time_went(shares: Shares, threshold: float) -> str:
    return (
        f"Of the accelerators' time {shares.compute:.1%} was computation ({threshold:.0%} is asked for), "
        f"{shares.wait:.1%} waiting for samples, {shares.held_up:.1%} waiting for ranks whose samples came "
        f"later, {shares.barrier:.1%} other barriers, {shares.harness:.1%} between steps."
    )


def _largest(times: Times) -> tuple[Bottleneck, str]:
    shares = times.shares
    samples = shares.wait + shares.held_up
    if samples >= max(shares.barrier, shares.harness):
        bottleneck, split = _behind_waits(times)
        return bottleneck, f"{split} {_straggler(times.skew['wait'])}".rstrip()
    if shares.barrier >= shares.harness:
        return (
            Bottleneck.BARRIER,
            "Look at cores that ranks share, at the network, and at uneven computation.",
        )
    return Bottleneck.CLIENT_CPU, "Most of the rest went by between steps, where only the client works."


def _behind_waits(times: Times) -> tuple[Bottleneck, str]:
    read_s, decode_s = times.over_ranks["read"].total_s, times.over_ranks["decode"].total_s
    if read_s + decode_s == 0:
        return Bottleneck.STORAGE, "The loader did not tell reading from decoding; reading is presumed."
    split = f"Loaders spent {format_seconds(read_s)} reading and {format_seconds(decode_s)} decoding."
    return (Bottleneck.STORAGE if read_s >= decode_s else Bottleneck.CLIENT_CPU), split


def _straggler(waits: Skew) -> str:
    """Names the rank that holds up the others, if one does all the time."""
    if waits.slowest_s <= STRAGGLER * waits.median_s:
        return ""
    return (
        f"Rank {waits.slowest_rank} waits {format_seconds(waits.slowest_s)} a step, the middle rank "
        f"{format_seconds(waits.median_s)}: look at its path to storage."
    )
