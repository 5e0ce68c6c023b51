"""For each number of an edition a value below, at, and above what it decides, and the three verdicts.

Place in the flow: an edition's number -> three trees -> verdicts. A test judges the same trees by an edition
whose number is a little larger or smaller, and by one whose comparison would be another: either shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.support.submission import tree_changes as do
from tests.support.submission.query_tree import valid_cache, valid_vectors
from tests.support.submission.timed_tree import (
    NUM_FILES,
    PAUSE,
    RUN_TIME,
    Round,
    valid_checkpointing,
    valid_training,
)

from penstock.submission.rules.rule import Verdict

if TYPE_CHECKING:
    from penstock.submission.edition import Edition, KvCacheLimits, ModelLimits, VectorLimits

_PASS, _FAIL, _WARNING = Verdict.PASS, Verdict.FAIL, Verdict.WARNING
AT_LEAST: Final = (_FAIL, _PASS, _PASS)
AT_MOST: Final = (_PASS, _PASS, _FAIL)
EXACTLY: Final = (_FAIL, _PASS, _FAIL)
Making = Callable[[int], Round]


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """`tree` makes a tree that lies -1, 0 or 1 steps from what the number at `number` decides."""

    number: str
    rule: str
    tree: Making
    verdicts: tuple[Verdict, Verdict, Verdict]
    share: float = 0.01
    """By how much a number that is not whole is changed."""


def boundaries(edition: Edition) -> Iterator[Boundary]:
    """One for each number of an edition whose runs are named by time."""
    trees = _Trees(edition)
    yield Boundary(
        number="num_runs",
        rule="runs.number",
        tree=trees.runs,
        verdicts=(_WARNING, _PASS, _FAIL) if edition.lacks_warm_ups else EXACTLY,
    )
    yield Boundary(
        number="num_warm_ups",
        rule="utilization.minimum",
        tree=trees.slow_run,
        verdicts=(_PASS, _WARNING, _FAIL),
    )
    yield from _of_sizing(edition, trees)
    yield Boundary(number="mean_tolerance", rule="means.run", tree=trees.mean, verdicts=AT_MOST, share=0.5)
    for workload in edition.min_utilization_percent:
        yield Boundary(
            number=f"min_utilization_percent.{workload}",
            rule="utilization.minimum",
            tree=trees.utilization(workload),
            verdicts=AT_LEAST,
        )
    yield Boundary(number="timed.num_datagen", rule="datagen.number", tree=trees.datagen, verdicts=EXACTLY)
    yield Boundary(
        number="timed.max_pause_runs", rule="runs.pauses", tree=trees.pause, verdicts=(_PASS, _FAIL, _FAIL)
    )
    if edition.edition == "v3.0":
        yield Boundary(
            number="timed.memory_tolerance", rule="system.hosts", tree=trees.described, verdicts=AT_MOST
        )
        yield Boundary(
            number="checkpoints.min_remap_share", rule="checkpoint.remap", tree=trees.remap, verdicts=AT_MOST
        )
    yield Boundary(
        number="timed.max_ratio_of_hosts",
        rule="hosts.alike",
        tree=trees.ratio,
        verdicts=(_PASS, _PASS, _WARNING),
    )
    yield Boundary(
        number="timed.min_accelerators_alone",
        rule="hosts.accelerators",
        tree=trees.alone,
        verdicts=(_WARNING, _PASS, _PASS),
    )
    yield from _of_checkpoints(edition, trees)
    if edition.rules == "v3.0":
        yield from _of_queries(edition.kv_cache, edition.vectors)


def _of_sizing(edition: Edition, trees: _Trees) -> Iterator[Boundary]:
    yield Boundary(number="sizing.min_steps", rule="sizing.steps", tree=trees.files, verdicts=AT_LEAST)
    yield Boundary(
        number="sizing.memory_multiple", rule="sizing.memory", tree=trees.memory, verdicts=AT_LEAST
    )
    if edition.is_softened:
        yield Boundary(
            number="sizing.memory_tolerance",
            rule="sizing.memory",
            tree=trees.typed_memory,
            verdicts=(_WARNING, _WARNING, _FAIL),
            share=0.5,
        )


def _of_checkpoints(edition: Edition, trees: _Trees) -> Iterator[Boundary]:
    checkpoints = edition.checkpoints
    for name, model in checkpoints.models.items():
        at = f"checkpoints.models.{name}"
        yield Boundary(
            number=f"{at}.closed_processes",
            rule="checkpoint.processes",
            tree=trees.processes(name, model),
            verdicts=EXACTLY,
        )
        yield Boundary(
            number=f"{at}.open_unit",
            rule="checkpoint.processes",
            tree=trees.unit(name, model),
            verdicts=EXACTLY,
        )
        upper = model.size_gib >= model.architecture_gib
        for part, outer in (("size_gib", upper), ("architecture_gib", not upper)):
            yield Boundary(
                number=f"{at}.{part}",
                rule="checkpoint.size",
                tree=trees.size(name, getattr(model, part), outer=outer),
                verdicts=(_PASS, _PASS, _WARNING) if outer else (_WARNING, _PASS, _PASS),
            )
    for kind, each in checkpoints.accelerator_memory_gb.items():
        yield Boundary(
            number=f"checkpoints.accelerator_memory_gb.{kind}",
            rule="checkpoint.memory",
            tree=trees.fitting(kind, each),
            verdicts=AT_MOST,
        )
    yield from _of_invocations(edition, trees)
    yield Boundary(
        number="checkpoints.size_tolerance",
        rule="checkpoint.size",
        tree=trees.size("llama3-8b", checkpoints.models["llama3-8b"].size_gib, outer=True),
        verdicts=(_PASS, _PASS, _WARNING),
    )


FLAGS: Final = {
    "num_users": "num-users",
    "duration_s": "duration",
    "gpu_gib": "gpu-mem-gb",
    "cpu_gib": "cpu-mem-gb",
    "max_allocations": "max-concurrent-allocs",
}


def _of_queries(cache: KvCacheLimits, vectors: VectorLimits) -> Iterator[Boundary]:
    for number, option in cache.options.items():
        for field, flag in FLAGS.items():
            yield Boundary(
                number=f"kv_cache.options.{number}.{field}",
                rule="kvcache.users" if field == "num_users" else "kvcache.table",
                tree=partial(_with_flag, int(number), flag, getattr(option, field)),
                verdicts=EXACTLY,
            )
    yield Boundary(
        number="kv_cache.seed",
        rule="kvcache.sequence",
        tree=lambda steps: _with_flag(1, "seed-base", cache.seed, steps),
        verdicts=EXACTLY,
    )
    yield Boundary(number="kv_cache.trials", rule="kvcache.sequence", tree=_with_trials, verdicts=EXACTLY)
    yield Boundary(
        number="kv_cache.delay_s",
        rule="kvcache.sequence",
        tree=lambda steps: _with_delay(cache.delay_s + steps),
        verdicts=EXACTLY,
    )
    yield Boundary(
        number="vectors.num_runs",
        rule="vectors.runs",
        tree=lambda steps: _with_searches(vectors.num_runs + steps),
        verdicts=EXACTLY,
    )


def _cache_commands(tree: Round) -> list[dict[str, str]]:
    metadata = next(value for path, value in tree.files.items() if path.endswith("_metadata.json"))
    commands: list[dict[str, str]] = metadata["command_output_files"]
    return commands


def _with_flag(option: int, flag: str, value: int, steps: int) -> Round:
    tree = valid_cache()
    for entry in _cache_commands(tree):
        if f"/option_{option}/" in entry["command"]:
            entry["command"] = entry["command"].replace(f"--{flag} {value}", f"--{flag} {value + steps}")
    return tree


def _with_trials(steps: int) -> Round:
    tree = valid_cache()
    entries = _cache_commands(tree)
    if steps < 0:
        entries[:] = [entry for entry in entries if "/trial_2 " not in entry["command"]]
    elif steps > 0:
        last = [entry for entry in entries if "/trial_2 " in entry["command"]]
        for entry in last:
            entries.insert(
                entries.index(entry) + 1, {"command": entry["command"].replace("/trial_2 ", "/trial_3 ")}
            )
    return tree


def _with_delay(delay_s: float) -> Round:
    tree = valid_cache()
    metadata = next(value for path, value in tree.files.items() if path.endswith("_metadata.json"))
    metadata["args"]["inter_option_delay"] = delay_s
    return tree


def _with_searches(num_runs: int) -> Round:
    tree = valid_vectors()
    if num_runs < 5:
        tree.drop("/run/20260701_100000/")
    elif num_runs > 5:
        tree.files |= {
            path.replace("20260701_100000", "20260701_095800"): value
            for path, value in tree.files.items()
            if "/run/20260701_100000/" in path
        }
    return tree


def _of_invocations(edition: Edition, trees: _Trees) -> Iterator[Boundary]:
    yield Boundary(
        number="checkpoints.num_checkpoints", rule="checkpoint.counts", tree=trees.counts, verdicts=EXACTLY
    )
    yield Boundary(
        number="checkpoints.max_invocations",
        rule="checkpoint.invocations",
        tree=trees.invocations,
        verdicts=AT_MOST,
    )
    yield Boundary(
        number="checkpoints.max_gap_s",
        rule="checkpoint.gap",
        tree=trees.gap,
        verdicts=(_PASS, _PASS, _WARNING) if edition.is_softened else AT_MOST,
    )
    yield Boundary(
        number="checkpoints.memory_multiple",
        rule="checkpoint.ratio",
        tree=trees.written,
        verdicts=(_WARNING, _WARNING, _PASS),
    )
    yield Boundary(
        number="checkpoints.min_per_host",
        rule="checkpoint.hosts",
        tree=trees.per_host,
        verdicts=(_FAIL, _WARNING, _PASS),
    )
    yield Boundary(
        number="checkpoints.subset_accelerators",
        rule="checkpoint.subset",
        tree=trees.subset,
        verdicts=EXACTLY,
    )


@dataclass(frozen=True)
class _Trees:
    """Makers of trees, by how many steps they lie from a limit."""

    edition: Edition

    def _training(self, **options: str) -> Round:
        return valid_training(self.edition.edition, num_runs=2, **options)

    def _changed(self, change: do.Change) -> Round:
        tree = self._training()
        change(tree)
        return tree

    def _checkpointing(self, change: do.Change, num_invocations: int = 2) -> Round:
        tree = valid_checkpointing(self.edition.edition, num_invocations=num_invocations)
        change(tree)
        return tree

    def runs(self, steps: int) -> Round:
        return valid_training(self.edition.edition, num_runs=6 + steps)

    def slow_run(self, steps: int) -> Round:
        """No run, the first, or the second is too slow."""
        tree = valid_training(self.edition.edition, num_runs=3)
        if steps >= 0:
            tree.summary("run", steps)["metric"]["train_au_percentage"] = [50.0] * 5
        return tree

    def files(self, steps: int) -> Round:
        return self._changed(do.summary("run", 1, num_files_train=NUM_FILES + steps))

    def memory(self, steps: int) -> Round:
        # 5 x 1000 GiB x 2^30 / 146600628 B is 36,621.3.
        return self._changed(
            do.together(
                do.summary("run", 0, num_files_train=40_000),
                do.summary("run", 1, host_memory_GB=[500.0, 500.0], num_files_train=36_622 + steps),
            )
        )

    def typed_memory(self, steps: int) -> Round:
        each = 50 / (1 - 0.01) + (steps - 0.5) / 1024
        return self._changed(do.summary("run", 1, host_memory_GB=[each, each], num_files_train=3_663))

    def mean(self, steps: int) -> Round:
        tree = self._training()
        tree.summary("run", 1)["metric"]["train_throughput_mean_samples_per_second"] *= (
            1 + (0.9 + 0.2 * steps) * 1e-9
        )
        return tree

    def utilization(self, workload: str) -> Making:
        limit = self.edition.min_utilization_percent[workload]

        def tree(steps: int) -> Round:
            found = self._training(workload=workload)
            found.summary("run", 1)["metric"]["train_au_percentage"] = [limit + steps / 1024] * 5
            return found

        return tree

    def datagen(self, steps: int) -> Round:
        changes: dict[int, do.Change] = {
            -1: do.drop("/datagen/"),
            0: do.drop("nothing"),
            1: do.second_datagen,
        }
        return self._changed(changes[steps])

    def pause(self, steps: int) -> Round:
        return self._changed(do.shift("run", 1, RUN_TIME - PAUSE + timedelta(seconds=steps)))

    def described(self, steps: int) -> Round:
        each = 256 * 1.1 + (steps - 0.5) / 16
        return self._changed(do.summary("run", 1, host_memory_GB=[each, each]))

    def ratio(self, steps: int) -> Round:
        return self._changed(do.summary("run", 1, host_memory_GB=[256.0, 384.0 + steps / 16]))

    def alone(self, steps: int) -> Round:
        return self._changed(do.summary("run", 1, num_hosts=1, num_accelerators=4 + steps))

    def processes(self, name: str, model: ModelLimits) -> Making:
        return self._of_model(name, lambda steps: model.closed_processes + steps, division="closed")

    def unit(self, name: str, model: ModelLimits) -> Making:
        return self._of_model(name, lambda steps: model.open_unit + steps, division="open")

    def _of_model(self, name: str, number: Callable[[int], int], *, division: str) -> Making:
        def tree(steps: int) -> Round:
            found = self._checkpointing(lambda tree: tree.rename_model(name), 1)
            found.metadata("checkpointing")["num_processes"] = number(steps)
            found.summary("checkpointing")["num_accelerators"] = number(steps)
            found.division = division
            return found

        return tree

    def size(self, name: str, gib: float, *, outer: bool) -> Making:
        """At the upper end of what is let pass, or at the lower one."""
        tolerance = self.edition.checkpoints.size_tolerance
        edge = gib * (1 + tolerance if outer else 1 - tolerance)

        def tree(steps: int) -> Round:
            # The edge itself is not a whole number of bits, so "at" lies a little within.
            within = (steps - 0.5 if outer else steps + 0.5) * 1e-4
            found = self._checkpointing(lambda tree: tree.rename_model(name), 1)
            found.summary("checkpointing")["metric"]["checkpoint_size_GB"] = edge * (1 + within)
            return found

        return tree

    def fitting(self, kind: str, each: float) -> Making:
        def tree(steps: int) -> Round:
            found = self._checkpointing(do.metadata("checkpointing", 0, accelerator=kind), 1)
            found.summary("checkpointing")["metric"]["checkpoint_size_GB"] = 8 * each + steps / 16
            return found

        return tree

    def counts(self, steps: int) -> Round:
        def change(tree: Round) -> None:
            tree.metadata("checkpointing")["args"]["num_checkpoints_write"] = 10 + steps
            stats = tree.document("checkpointing", 0, "0_per_epoch_stats.json")["1"]
            entry = stats.pop("save_ckpt10")
            stats.update({f"save_ckpt{number}": entry for number in range(10, 11 + steps)})

        return self._checkpointing(change, 1)

    def invocations(self, steps: int) -> Round:
        def change(tree: Round) -> None:
            tree.division = "open"
            if steps > 0:
                do.third_invocation(tree)

        return self._checkpointing(change, 1 if steps < 0 else 2)

    def gap(self, steps: int) -> Round:
        return self._checkpointing(do.shift("checkpointing", 1, timedelta(seconds=10 + steps / 16)))

    def written(self, steps: int) -> Round:
        return self._checkpointing(do.metric("checkpointing", 0, checkpoint_size_GB=76.8 + steps / 16))

    def per_host(self, steps: int) -> Round:
        return self._checkpointing(do.summary("checkpointing", 0, num_hosts=2, num_accelerators=8 + steps), 1)

    def subset(self, steps: int) -> Round:
        return self._checkpointing(
            do.together(
                do.config("checkpoint", "checkpointing", 0, mode="subset"),
                do.summary("checkpointing", 0, num_accelerators=8 + steps),
            ),
            1,
        )

    def remap(self, steps: int) -> Round:
        change = do.capability(remap_time_in_seconds=40 + steps / 16, simultaneous_read=False)
        return self._checkpointing(change)
