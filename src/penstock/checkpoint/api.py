"""`save` and `load`: one checkpoint in one call, without a manager.

They show the order of the steps; `saver` and `loader` carry them out. Invariant: each call either returns on
all ranks with its work done and durable, or raises on all ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.checkpoint.commit.checkpoints import AnyPath, open_parent, stage_on_all_ranks, write_and_commit
from penstock.checkpoint.engine import LoadChoice, RankSaveStats, Replicas, SaveChoice, State, borrowed_comm
from penstock.checkpoint.formats.checkpoint_source import CheckpointReplaced
from penstock.checkpoint.loader import CheckpointLoader, LoadReport, open_path_on_all_ranks
from penstock.checkpoint.plan import save_plan
from penstock.checkpoint.plan.load_plan import LoadOptions, plan_load, plan_rank_load
from penstock.checkpoint.saver import WAITING_BUFFER_BYTES, Saver
from penstock.checkpoint.state.regions import Ints, Regions, StoredRegions, element_sizes
from penstock.checkpoint.state.walk import NamePatterns
from penstock.cluster.comm import run_on_rank0
from penstock.errors import DataDamaged, UsageError
from penstock.progress import Progress
from penstock.units import format_bytes

NUM_READINGS: Final = 5
"""The number of times that a single process tries to read a checkpoint that is being replaced."""


def load(  # noqa: PLR0913 - each option is independent of the others
    state: State,
    path: AnyPath,
    *,
    only: NamePatterns | None = None,
    exclude: NamePatterns | None = None,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    convert_dtypes: bool = False,
    trust: bool = False,
    verify: bool = False,
    process_group: Any = None,
    progress: Progress | None = None,
) -> LoadReport:
    """Load the checkpoint at `path` into `state` in place, and report what was loaded. Collective.

    >>> report = pc.load({"model": model.state_dict()}, "/pfs/run/step-100", only="model.*")

    Tensors keep their memory and receive new values; everything else is replaced in its dict or list. `path`
    is the folder of a torch distributed checkpoint, a file written by torch.save, or safetensors. `only` and
    `exclude` select parts of the state by name, with `*` for any text. `rename` maps names in the state to
    names in the checkpoint, as in `{"model.*": "module.*"}`. With `strict=False`, parts that the checkpoint
    lacks are left unchanged. A tensor whose shape differs from the checkpoint's is always an error; one whose
    dtype differs is an error unless `convert_dtypes` is set. `trust` allows objects whose unpickling may run
    code from the checkpoint. `process_group` names the ranks that load (default: all). `progress` is informed
    of every byte transferred; if it raises, the load is cancelled on all ranks.

    Items that are loaded whole are verified against their checksums; if a folder has no checksums, a warning
    is issued. With `verify`, rank 0 first reads the whole checkpoint, including what this load does not need,
    and the call raises if anything is damaged or lacks a checksum.
    """
    choice = LoadChoice(only, exclude, rename, strict=strict, convert_dtypes=convert_dtypes, trust=trust)
    with borrowed_comm(process_group) as comm, closing(CheckpointLoader()) as loader:
        if verify:
            run_on_rank0(comm, lambda: _require_verified(path), awaiting="rank 0 to verify the checkpoint")
        for _ in range(NUM_READINGS - 1 if comm.size == 1 else 0):
            checkpoint = open_path_on_all_ranks(path, comm)
            with suppress(CheckpointReplaced):
                return loader.load_from(state, checkpoint, comm, choice, progress)
        checkpoint = open_path_on_all_ranks(path, comm)
        return loader.load_from(state, checkpoint, comm, choice, progress)


def _require_verified(path: AnyPath) -> None:
    from penstock.checkpoint.tools.verify import verify as verify_checkpoint  # noqa: PLC0415 - rarely asked for

    found = verify_checkpoint(path)
    if found.damage:
        first = found.damage[0]
        raise DataDamaged(
            f"The checkpoint is damaged: {first.what}",
            where=f"{found.uri}, {first.file}, bytes {first.begin} to {first.end}",
            fix="Load an older one. `penstock checkpoint verify` lists all damage.",
        )
    if not found.is_checked:
        raise UsageError(
            "The checkpoint cannot be verified: not all of it has checksums",
            where=found.uri,
            fix=" ".join([*found.notes, "Load it without verify=True, and save it again."]),
        )


def save(
    state: State,
    path: AnyPath,
    *,
    only: NamePatterns | None = None,
    dtype: Any = None,
    writers: int = 2,
    separation_hint: str | None = None,
    transforms: Sequence[str] = (),
    replicas: Replicas = "share",
    process_group: Any = None,
    progress: Progress | None = None,
) -> tuple[RankSaveStats, ...]:
    """Save `state` as one checkpoint at `path`, and return the statistics of each rank. Collective.

    >>> pc.save({"model": model.state_dict(), "step": 100}, "/pfs/run/step-100")

    An existing checkpoint at `path` is replaced atomically, once the new one is complete. `only` saves the
    parts whose names match; `dtype` converts floating-point tensors. `transforms`, as in `["stream.zstd/1"]`,
    make items smaller, but transformed items can only be read whole. With `replicas="compare"`, the call
    raises if replicas differ, and names the tensors and ranks. Each rank writes `writers` files in parallel;
    parts whose names begin with `separation_hint` go to separate files. `process_group` names the ranks that
    save (default: all). `progress` is informed of every byte transferred.
    """
    options = save_plan.SaveOptions(writers=writers, separation_hint=separation_hint)
    saver = Saver(options, staging_bytes=WAITING_BUFFER_BYTES, transforms=transforms, replicas=replicas)
    with borrowed_comm(process_group) as comm, closing(saver):
        storage, name = open_parent(path, rank=comm.rank)
        prepared = saver.prepare(state, comm, SaveChoice(only=only, dtype=dtype))
        _, stats = write_and_commit(
            prepared,
            stage_on_all_ranks(prepared, "commit", comm),
            storage,
            name,
            comm,
            progress=progress,
        )
    return stats


NUM_TENSORS_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraffic:
    """Bytes of tensors on one rank.

    In a load, other ranks send this rank the bytes that it does not read itself.
    """

    rank: int
    holds_bytes: int
    writes_bytes: int
    reads_bytes: int
    receives_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The plan of a save and a load: what each of the `ranks` would write and read. Can be printed."""

    unique_bytes: int
    """The bytes of all tensors, each element counted once: what all ranks together write, and also read."""
    ranks: tuple[RankTraffic, ...]
    writes: tuple[str, ...]
    """Lines of text: the largest tensors, and which ranks write which parts of them."""
    objects: tuple[tuple[str, ...], ...]
    """The names of the objects that each rank writes, by rank; `rng@rank3` belongs to rank 3 alone."""

    def __str__(self) -> str:
        lines = [
            f"{format_bytes(self.unique_bytes)} in tensors, on {len(self.ranks)} rank(s)",
            "",
            f"{'rank':>4}  {'holds':>10}  {'writes':>10}  {'reads':>10}  {'receives':>10}  objects",
        ]
        for part, objects in zip(self.ranks, self.objects, strict=True):
            sizes = (part.holds_bytes, part.writes_bytes, part.reads_bytes, part.receives_bytes)
            figures = "  ".join(f"{format_bytes(size):>10}" for size in sizes)
            lines.append(f"{part.rank:>4}  {figures}  {len(objects)}")
        return "\n".join([*lines, "", *self.writes])


def dry_run(state: Mapping[str, Any], *, process_group: Any = None) -> DryRun:
    """Plan what `save` and `load` of `state` would do on these ranks. Collective; moves no tensor data.

    >>> print(pc.dry_run({"model": model.state_dict()}))

    The load is planned for the same ranks and placements as the save; `process_group` names the ranks
    (default: all).
    """
    from penstock.checkpoint.replica_comparison import add_digests  # noqa: PLC0415 - loads torch
    from penstock.checkpoint.state.tensors import collect_for_save  # noqa: PLC0415 - loads torch

    with borrowed_comm(process_group) as comm:
        local_state = collect_for_save(state, is_alone=comm.size == 1)
        if comm.size > 1:
            local_state = add_digests(local_state, state, comm.job_ranks)
        holdings = local_state.holdings
        all_holdings: list[save_plan.Holdings] = comm.gather(holdings, awaiting="what all ranks hold")
    shared, objects = save_plan.plan_job(all_holdings, save_plan.SaveOptions())
    merged = save_plan.merge_holdings(
        [
            save_plan.rename_own_tensors(held, found.own_tensors, rank)
            for rank, (held, found) in enumerate(zip(all_holdings, objects, strict=True))
        ]
    )
    element_bytes = element_sizes(merged.tensors)
    return DryRun(
        unique_bytes=_sum(shared.regions, element_bytes),
        ranks=tuple(_count_traffic(shared, merged, element_bytes)),
        writes=tuple(_describe_writes(shared, shared.regions.num_bytes(element_bytes))),
        objects=tuple(tuple(placed.stored_name for placed in found.placed) for found in objects),
    )


def _count_traffic(
    shared: save_plan.RankRegions, merged: save_plan.RankRegions, element_bytes: Ints
) -> list[RankTraffic]:
    options = LoadOptions()
    wanted = [merged.regions.take(merged.rank == rank) for rank in range(shared.num_ranks)]
    # The checkpoint that this plan would produce, with one file per rank and without envelopes.
    size = shared.regions.num_bytes(element_bytes)
    begin = np.cumsum(size) - size
    is_packed = np.zeros(len(size), dtype=np.bool_)
    stored = StoredRegions(shared.regions, shared.rank, begin, size, begin, is_packed)
    plan = plan_load(stored, element_bytes, wanted, options)
    parts = []
    for rank, regions in enumerate(wanted):
        own = plan_rank_load(plan, element_bytes, rank, options)
        parts.append(
            RankTraffic(
                rank=rank,
                holds_bytes=_sum(regions, element_bytes),
                writes_bytes=_sum(shared.regions.take(shared.rank == rank), element_bytes),
                reads_bytes=_sum(own.regions, element_bytes),
                receives_bytes=_sum(own.receives.regions, element_bytes),
            )
        )
    return parts


def _sum(regions: Regions, element_bytes: Ints) -> int:
    return int(regions.num_bytes(element_bytes).sum())


def _describe_writes(shared: save_plan.RankRegions, size: Ints) -> Iterator[str]:
    """Yield a line for each of the largest tensors, and one for each rank that writes a part of it."""
    tensor_bytes = np.bincount(shared.regions.tensor, weights=size, minlength=len(shared.tensors))
    for number in np.argsort(-tensor_bytes, kind="stable")[:NUM_TENSORS_SHOWN].tolist():
        facts = shared.tensors[number]
        yield f"{facts.name}  {facts.dtype} {list(facts.shape)}"
        for row in np.flatnonzero(shared.regions.tensor == number).tolist():
            bounds = zip(*shared.regions.region(row, len(facts.shape)), facts.shape, strict=True)
            # In numpy's slice notation.
            slices = [
                ":" if (begin, extent) == (0, whole) else f"{begin}:{begin + extent}"
                for begin, extent, whole in bounds
            ]
            what = f"[{', '.join(slices)}], {format_bytes(int(size[row]))}" if slices else "its one element"
            yield f"    rank {shared.rank[row]} writes {what}"
    if len(shared.tensors) > NUM_TENSORS_SHOWN:
        yield f"and {len(shared.tensors) - NUM_TENSORS_SHOWN} smaller tensors"
