"""Rules of our own about the order of samples, by the `run.json` of our runs: no edition decides about it.

Invariant: they only warn, and do not apply to a run without `run.json`.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.submission.finding import Finding, Verdict, not_applicable, pass_if
from penstock.submission.parsed_file import MissingFact, ParsedFile
from penstock.submission.rules import rule

_MODULUS: Final = 1 << 64
_CHUNK_ITEMS: Final = 1 << 20
"""Items that are hashed together, so that memory stays small."""
MAX_ITEMS: Final = 50_000_000
"""Items whose digest is computed: a second's work."""
_NO_RECORD: Final = "the run has no run.json"


def _without_record(case: rule.RunCase) -> str:
    return _NO_RECORD if case.run.record.is_missing else ""


def _epochs(record: ParsedFile) -> list[ParsedFile]:
    epochs = record.value("plan", "epochs")
    if not isinstance(epochs, list) or not epochs:
        raise MissingFact("plan.epochs is not a list of epochs", where=record.file)
    return [ParsedFile(file=record.file, content=epoch) for epoch in epochs]


def _ranks(epoch: ParsedFile) -> list[ParsedFile]:
    ranks = epoch.value("ranks")
    if not isinstance(ranks, list) or not ranks:
        raise MissingFact("an epoch of plan.epochs has no list of ranks", where=epoch.file)
    return [ParsedFile(file=epoch.file, content=rank) for rank in ranks]


def _num_samples(record: ParsedFile) -> int:
    dataset = ("workload", "dataset")
    return record.integer(*dataset, "num_files_train") * record.integer(*dataset, "num_samples_per_file")


def _digest(share: ParsedFile, *path: str) -> int:
    text = share.text(*path, "digest")
    try:
        return int(text, 16)
    except ValueError as error:
        raise MissingFact(f"digest is {text!r:.60}, not a number", where=share.file) from error


def _largest_remainder(case: rule.RunCase) -> int:
    """The samples that the worst epoch leaves out; negative where it reads some twice."""
    total, epochs = _num_samples(case.run.record), _epochs(case.run.record)
    return max((total - sum(rank.integer("samples") for rank in _ranks(e)) for e in epochs), key=abs)


def _prove_remainder(case: rule.RunCase, remainder: int, _: int) -> str:
    total, policy = _num_samples(case.run.record), case.run.record.text("plan", "division")
    share = remainder / total if total else 0.0
    return f"an epoch leaves out {remainder:,} of {total:,} samples ({share:.3%}); the policy is {policy}"


rule.limit_rule(
    rule.RunCase,
    id="order.left_out",
    title="Every epoch reads all samples",
    editions=rule.LATER,
    source="ours",
    formula="samples - those of all ranks == 0 in each epoch (else warning), with count, share and policy",
    passes="28,000 samples, batches of 7 on 8 accelerators: none is left out",
    fails="28,001 samples: one is left out of each epoch (a warning)",
    not_applicable_if=_without_record,
    value=_largest_remainder,
    compare="==",
    limit=0,
    evidence=lambda case: case.run.record.file,
    show="{:,} samples",
    proof=_prove_remainder,
    fix="Choose a number of files that all accelerators' batches divide.",
    otherwise=Verdict.WARNING,
)


@rule.run_rule(
    id="order.shuffled",
    title="Samples come in the order that the workload asks for, which changes in each epoch",
    editions=rule.LATER,
    source="ours",
    formula=(
        "plan.shuffle is seed where the workload shuffles; ranks of two epochs do not have the same shares, "
        "unless seed_change_epoch is false or there is one rank (else warning)"
    ),
    passes="file_shuffle: seed, shuffle: seed, other shares in each epoch",
    fails="file_shuffle: seed, shuffle: off (a warning)",
)
def _check_shuffle(case: rule.RunCase) -> Iterator[Finding]:
    """A finding for the order, and one for its change."""
    record = case.run.record
    if record.is_missing:
        yield not_applicable(case.name, _NO_RECORD)
        return
    is_requested = any(
        record.text("workload", "reader", key).lower() != "off" for key in ("file_shuffle", "sample_shuffle")
    )
    is_shuffled = record.text("plan", "shuffle").lower() != "off"
    yield pass_if(
        is_shuffled or not is_requested,
        evidence=record.file,
        value=f"shuffled: {is_shuffled}",
        limit=f"shuffled: {is_requested}",
        proof=f"shuffled: {is_requested} in the workload, {is_shuffled} in the run",
        fix="Repeat the run with the workload's own shuffles.",
        otherwise=Verdict.WARNING,
    )
    orders = [tuple(_digest(rank) for rank in _ranks(epoch)) for epoch in _epochs(record)]
    # A single rank has all samples in each epoch, so that its digest never changes.
    must_change = (
        is_requested and len(orders[0]) > 1 and record.boolean("workload", "train", "seed_change_epoch")
    )
    num_orders = len(set(orders))
    yield pass_if(
        not must_change or num_orders == len(orders),
        evidence=record.file,
        value=f"{num_orders} orders",
        limit=f"{len(orders)} orders",
        proof=f"{len(orders)} epochs deal out {num_orders} different ways",
        fix="Repeat the run with seed_change_epoch.",
        otherwise=Verdict.WARNING,
    )


@rule.run_rule(
    id="order.once",
    title="No epoch reads a sample twice",
    editions=rule.LATER,
    source="ours",
    formula="digests of all ranks and of what is left out sum up to that of all samples (else warning)",
    passes="eight ranks with an eighth each",
    fails="one rank that has what another has (a warning)",
)
def _check_repeated_samples(case: rule.RunCase) -> Iterator[Finding]:
    record = case.run.record
    if record.is_missing:
        yield not_applicable(case.name, _NO_RECORD)
        return
    total, item_samples = _num_samples(record), record.integer("plan", "item_samples")
    per_file = record.integer("workload", "dataset", "num_samples_per_file")
    try:
        expected = digest_of_all(total, item_samples, per_file)
    except MissingFact as reason:
        raise MissingFact(reason.what, where=record.file) from reason
    wrong, num_limited = [], 0
    for number, epoch in enumerate(_epochs(record), start=1):
        if epoch.integer("steps") != epoch.integer("steps_without_limit"):
            num_limited += 1
            continue
        digest = sum(_digest(rank) for rank in _ranks(epoch)) + _digest(epoch, "left_out")
        if digest % _MODULUS != expected:
            wrong.append(str(number))
    if num_limited:
        yield not_applicable(record.file, f"{num_limited} epochs ended early, by a limit of steps")
    yield pass_if(
        not wrong,
        evidence=record.file,
        value=f"{len(wrong)} epochs",
        limit="0 epochs",
        proof=(
            f"epochs {', '.join(wrong)} do not read each sample once"
            if wrong
            else "all epochs read each sample once"
        ),
        fix="Read with another division than pad, and report this if there was none.",
        otherwise=Verdict.WARNING,
    )


@lru_cache(maxsize=16)
def digest_of_all(num_samples: int, item_samples: int, samples_per_file: int) -> int:
    """The digest of all samples, as `run.json` defines it: see the plan of a training run."""
    if min(num_samples, item_samples, samples_per_file) < 1:
        raise MissingFact("run.json has no samples")
    per_file = -(-samples_per_file // item_samples)
    last = samples_per_file - (per_file - 1) * item_samples
    num_items = num_samples // samples_per_file * per_file
    if num_items > MAX_ITEMS:
        raise MissingFact(f"{num_items:,} items are more than the {MAX_ITEMS:,} whose order is verified")
    total = 0
    for start in range(0, num_items, _CHUNK_ITEMS):
        items = np.arange(start, min(start + _CHUNK_ITEMS, num_items), dtype=np.uint64)
        sizes = np.where(items % per_file == per_file - 1, last, item_samples).astype(np.uint64)
        total += int(_mix(_mix(items) + sizes).sum(dtype=np.uint64))
    return total % _MODULUS


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finisher of splitmix64."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
