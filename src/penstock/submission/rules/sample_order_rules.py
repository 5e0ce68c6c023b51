"""Rules of our own on the order of samples, by the `run.json` of our runs: no edition decides them.

Invariant: they only warn. Where a leaf has no `run.json` they are about something else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.submission.finding import Finding, Verdict
from penstock.submission.parsed_file import Document, Unknown
from penstock.submission.rules.rule import LATER, JobRule, judged, not_applicable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.submission.edition import Edition
    from penstock.submission.result_files import Job, Result

_WORD: Final = 1 << 64
_STEP: Final = 1 << 20
"""Items that are hashed together, so that memory stays small."""


class _RecordRule(JobRule):
    """A rule that asks `run.json`."""

    editions = LATER
    source = "ours"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """The findings of a run that has a record."""
        if job.record.problem == "there is no such file":
            yield not_applicable(job.name, "the run has no run.json")
            return
        yield from self.judge_record(job.record)

    @abstractmethod
    def judge_record(self, record: Document) -> Iterator[Finding]:
        """The findings of one record."""


def _epochs(record: Document) -> list[Document]:
    found = record.value("plan", "epochs")
    if not isinstance(found, list) or not found:
        raise Unknown("plan.epochs is no list of epochs", where=record.file)
    return [Document(file=record.file, tree=epoch) for epoch in found]


def _lots(epoch: Document) -> list[Document]:
    ranks = epoch.value("ranks")
    if not isinstance(ranks, list) or not ranks:
        raise Unknown("an epoch of plan.epochs has no list of ranks", where=epoch.file)
    return [Document(file=epoch.file, tree=rank) for rank in ranks]


def _num_samples(record: Document) -> int:
    dataset = ("workload", "dataset")
    return record.whole(*dataset, "num_files_train") * record.whole(*dataset, "num_samples_per_file")


def _digest(lot: Document, *path: str) -> int:
    text = lot.text(*path, "digest")
    try:
        return int(text, 16)
    except ValueError as error:
        raise Unknown(f"digest is {text!r:.60}, no number", where=lot.file) from error


class LeftOut(_RecordRule):
    """Samples that nobody reads."""

    id = "order.left_out"
    title = "Every epoch reads all samples"
    formula = "samples - those of all ranks == 0 in each epoch (else warning), with count, share and policy"
    passes = "28,000 samples, batches of 7 on 8 accelerators: none is left out"
    fails = "28,001 samples: one is left out of each epoch (a warning)"

    def judge_record(self, record: Document) -> Iterator[Finding]:
        """One finding for all epochs: the worst."""
        total, policy = _num_samples(record), record.text("plan", "division")
        left = [total - sum(lot.whole("samples") for lot in _lots(epoch)) for epoch in _epochs(record)]
        worst = max(left, key=abs)
        share = worst / total if total else 0.0
        yield judged(
            worst == 0,
            evidence=record.file,
            value=f"{worst:,} samples",
            limit="0 samples",
            proof=f"an epoch leaves out {worst:,} of {total:,} samples ({share:.3%}); the policy is {policy}",
            fix="Choose a number of files that all accelerators' batches divide.",
            otherwise=Verdict.WARNING,
        )


class Shuffled(_RecordRule):
    """The order."""

    id = "order.shuffled"
    title = "Samples come in the order that the workload asks for, anew in each epoch"
    formula = (
        "plan.shuffle is seed where the workload shuffles; ranks of two epochs do not have the same lots, "
        "unless seed_change_epoch is false or there is one rank (else warning)"
    )
    passes = "file_shuffle: seed, shuffle: seed, other lots in each epoch"
    fails = "file_shuffle: seed, shuffle: off (a warning)"

    def judge_record(self, record: Document) -> Iterator[Finding]:
        """A finding for the order, and one for its change."""
        asked = any(
            record.text("workload", "reader", key).lower() != "off"
            for key in ("file_shuffle", "sample_shuffle")
        )
        done = record.text("plan", "shuffle").lower() != "off"
        yield judged(
            done or not asked,
            evidence=record.file,
            value=f"shuffled: {done}",
            limit=f"shuffled: {asked}",
            proof=f"shuffled: {asked} in the workload, {done} in the run",
            fix="Repeat the run with the workload's own shuffles.",
            otherwise=Verdict.WARNING,
        )
        epochs = [tuple(_digest(lot) for lot in _lots(epoch)) for epoch in _epochs(record)]
        must_change = asked and len(epochs[0]) > 1 and record.flag("workload", "train", "seed_change_epoch")
        num_orders = len(set(epochs))
        yield judged(
            not must_change or num_orders == len(epochs),
            evidence=record.file,
            value=f"{num_orders} orders",
            limit=f"{len(epochs)} orders",
            proof=f"{len(epochs)} epochs deal out {num_orders} different ways",
            fix="Repeat the run with seed_change_epoch.",
            otherwise=Verdict.WARNING,
        )


class OnlyOnce(_RecordRule):
    """Nothing twice."""

    id = "order.once"
    title = "No epoch reads a sample twice"
    formula = "digests of all ranks and of what is left out sum up to that of all samples (else warning)"
    passes = "eight ranks with an eighth each"
    fails = "one rank that has what another has (a warning)"

    def judge_record(self, record: Document) -> Iterator[Finding]:
        """One finding for all epochs."""
        total, per_item = _num_samples(record), record.whole("plan", "item_samples")
        per_file = record.whole("workload", "dataset", "num_samples_per_file")
        wrong, limited = [], 0
        for number, epoch in enumerate(_epochs(record), start=1):
            if epoch.whole("steps") != epoch.whole("steps_without_limit"):
                limited += 1
                continue
            found = sum(_digest(lot) for lot in _lots(epoch)) + _digest(epoch, "left_out")
            if found % _WORD != digest_of_all(total, per_item, per_file):
                wrong.append(number)
        if limited:
            yield not_applicable(record.file, f"{limited} epochs ended early, by a limit of steps")
        yield judged(
            not wrong,
            evidence=record.file,
            value=f"{len(wrong)} epochs",
            limit="0 epochs",
            proof=(
                f"epochs {', '.join(map(str, wrong))} do not come to all samples once"
                if wrong
                else "all epochs come to all samples once"
            ),
            fix="Read with another division than pad, and report this if there was none.",
            otherwise=Verdict.WARNING,
        )


@lru_cache(maxsize=16)
def digest_of_all(num_samples: int, item_samples: int, samples_per_file: int) -> int:
    """The digest of all samples, by the rule that `run.json` states it in: see the plan of a training run."""
    if min(num_samples, item_samples, samples_per_file) < 1:
        raise Unknown("run.json has no samples")
    per_file = -(-samples_per_file // item_samples)
    last = samples_per_file - (per_file - 1) * item_samples
    num_items = num_samples // samples_per_file * per_file
    total = 0
    for start in range(0, num_items, _STEP):
        items = np.arange(start, min(start + _STEP, num_items), dtype=np.uint64)
        sizes = np.where(items % per_file == per_file - 1, last, item_samples).astype(np.uint64)
        total += int(_mix(_mix(items) + sizes).sum(dtype=np.uint64))
    return total % _WORD


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finisher of splitmix64."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
