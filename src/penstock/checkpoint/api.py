"""Save or load one checkpoint in one call, without a manager; and the engine that a manager uses.

`save` and `load` show the order of the steps; `saving.saver` and `loading.loader` carry them out. Invariant:
each call returns on all ranks with its work done and durable, or raises on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.checkpoint.commit.catalog import AnyPath, CheckpointRef, open_parent
from penstock.checkpoint.commit.transaction import write_and_commit
from penstock.checkpoint.engine import LoadChoice, NamePatterns, RankSaveStats, SaveChoice, State
from penstock.checkpoint.formats.checkpoint_source import open_path_together
from penstock.checkpoint.loading.loader import CheckpointLoader, LoadReport
from penstock.checkpoint.plan.load_plan import LoadOptions, plan_load, plan_rank_load
from penstock.checkpoint.plan.save_plan import (
    Holdings,
    MergedHoldings,
    SaveOptions,
    SharedSavePlan,
    merge_holdings,
)
from penstock.checkpoint.saving.saver import (
    DEFAULT_STAGING_BYTES,
    WAITING_BUFFER_BYTES,
    SavePlanCache,
    Saver,
    TensorSave,
)
from penstock.checkpoint.state.leaves import expand_stateful
from penstock.checkpoint.state.process_group import RankGroup, borrowed_group
from penstock.checkpoint.state.regions import Ints, Regions, StoredRegions, element_sizes
from penstock.progress import Progress
from penstock.units import format_bytes

DEFAULT_TIMEOUT_S: Final = 1800.0
"""The slowest rank may read so much longer than the fastest."""


def load(  # noqa: PLR0913 - each is a choice of its own, and none without a default is left out
    state: State,
    path: AnyPath,
    *,
    only: NamePatterns | None = None,
    exclude: NamePatterns | None = None,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    convert_dtypes: bool = False,
    trust: bool = False,
    process_group: Any = None,
    progress: Progress | None = None,
) -> LoadReport:
    """Load the checkpoint at `path` into `state`, in place; what was loaded and what was left. Collective.

    >>> report = pc.load({"model": model.state_dict()}, "/pfs/run/step-100", only="model.*")

    Tensors are filled where they are, everything else is replaced in its dict or list. `path` may be a folder
    of torch's distributed checkpoints, a file of torch.save, or safetensors. `rename` maps names of the state
    to the checkpoint's, as in `{"model.*": "module.*"}`. With `strict=False`, parts that the checkpoint lacks
    stay as they are; a part of another shape is an error always, one of another dtype unless
    `convert_dtypes`. `trust` allows objects whose unpickling may run code out of the checkpoint.
    """
    choice = LoadChoice(
        only=only,
        exclude=exclude,
        rename=rename,
        strict=strict,
        convert_dtypes=convert_dtypes,
        trust=trust,
    )
    with borrowed_group(process_group) as group, closing(CheckpointLoader()) as loader:
        group.comm.timeout_s = DEFAULT_TIMEOUT_S
        checkpoint = open_path_together(path, group.comm)
        return loader.load_from(state, checkpoint, group, choice, progress)


def save(  # noqa: PLR0913 - a save has as many choices
    state: State,
    path: AnyPath,
    *,
    only: NamePatterns | None = None,
    dtype: Any = None,
    writers: int = 2,
    separation_hint: str | None = None,
    transforms: Sequence[str] = (),
    process_group: Any = None,
    progress: Progress | None = None,
) -> tuple[RankSaveStats, ...]:
    """Save `state` as one checkpoint at `path`; what each rank spent on it, in rank order. Collective.

    >>> pc.save({"model": model.state_dict(), "step": 100}, "/pfs/run/step-100")

    A checkpoint that lies there already is replaced in one step, once the new one is whole. `only` saves the
    parts whose names match, `dtype` converts tensors of floating point. With `transforms`, as in
    `["stream.zstd/1"]`, items are smaller, but can be read only as wholes.
    """
    options = SaveOptions(writers=writers, separation_hint=separation_hint)
    saver = Saver(options, staging_bytes=WAITING_BUFFER_BYTES, transforms=transforms)
    with borrowed_group(process_group) as group, closing(saver):
        storage, name = open_parent(path, rank=group.comm.rank)
        prepared = saver.prepare(state, group, SaveChoice(only=only, dtype=dtype))
        _, stats = write_and_commit(
            prepared,
            prepared.stage("commit"),
            storage,
            name,
            group.comm,
            timeout_s=DEFAULT_TIMEOUT_S,
            progress=progress,
        )
    return stats


class TorchEngine:
    """An `Engine` for nested states of tensors and other values. `staging_bytes` bounds a rank's copies."""

    def __init__(
        self, options: SaveOptions | None = None, *, staging_bytes: int = DEFAULT_STAGING_BYTES
    ) -> None:
        self._saver = Saver(options or SaveOptions(), staging_bytes=staging_bytes)
        self._loader = CheckpointLoader()

    def prepare(self, state: State, group: RankGroup, choice: SaveChoice) -> TensorSave:
        """Let all ranks agree who writes what; collective."""
        return self._saver.prepare(state, group, choice)

    def load(
        self,
        state: State,
        stored: CheckpointRef,
        group: RankGroup,
        choice: LoadChoice,
        progress: Progress | None,
    ) -> LoadReport:
        """Fill `state` in place; collective."""
        return self._loader.load(state, stored, group, choice, progress)

    def close(self) -> None:
        """Let go of the memory of both halves."""
        self._saver.close()
        self._loader.close()


NUM_TENSORS_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraffic:
    """Bytes of tensors on one rank. What it holds and does not read when loading, others send it."""

    rank: int
    holds_bytes: int
    writes_bytes: int
    reads_bytes: int
    receives_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWrite:
    """One piece that a rank writes: `offsets` and `sizes` are in the whole tensor."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Who writes and who reads what. `print` it, or look at its parts."""

    unique_bytes: int
    """Of all tensors, each element counted once: so much is written, and so much is read by all together."""
    ranks: tuple[RankTraffic, ...]
    pieces: tuple[PlannedWrite, ...]
    """What is written, tensor by tensor."""
    objects: tuple[tuple[str, ...], ...]
    """Names of what is no tensor, by the rank that writes it; `rng@rank3` is rank 3's own."""

    def __str__(self) -> str:
        return "\n".join([*self._about_ranks(), "", *self._about_tensors()])

    def _about_ranks(self) -> list[str]:
        lines = [
            f"{format_bytes(self.unique_bytes)} in tensors, on {len(self.ranks)} rank(s)",
            "",
            f"{'rank':>4}  {'holds':>10}  {'writes':>10}  {'reads':>10}  {'receives':>10}  objects",
        ]
        for part, objects in zip(self.ranks, self.objects, strict=True):
            counted = (part.holds_bytes, part.writes_bytes, part.reads_bytes, part.receives_bytes)
            figures = "  ".join(f"{format_bytes(each):>10}" for each in counted)
            lines.append(f"{part.rank:>4}  {figures}  {len(objects)}")
        return lines

    def _about_tensors(self) -> list[str]:
        by_name: dict[str, list[PlannedWrite]] = {}
        for piece in self.pieces:
            by_name.setdefault(piece.tensor, []).append(piece)
        largest = sorted(by_name, key=lambda name: -sum(piece.size_bytes for piece in by_name[name]))
        lines = []
        for name in largest[:NUM_TENSORS_SHOWN]:
            first = by_name[name][0]
            lines.append(f"{name}  {first.dtype} {list(first.shape)}")
            lines += [f"    rank {piece.rank} writes {_ranges(piece)}" for piece in by_name[name]]
        if len(largest) > NUM_TENSORS_SHOWN:
            lines.append(f"and {len(largest) - NUM_TENSORS_SHOWN} smaller tensors")
        return lines


def dry_run(state: Mapping[str, Any], *, process_group: Any = None) -> DryRun:
    """What `save` and `load` of `state` would do on these ranks. Collective; moves no tensor.

    >>> print(pc.dry_run({"model": model.state_dict()}))

    Loading is told for the same ranks and placements as saving.
    """
    from penstock.checkpoint.state.tensors import collect_for_save  # noqa: PLC0415 - loads torch

    with borrowed_group(process_group) as group:
        holdings = collect_for_save(expand_stateful(state)).holdings
        agreed = SavePlanCache(group.comm).agree(holdings, SaveOptions())
        everybodys: list[Holdings] = group.comm.gather(holdings, awaiting="what all ranks hold")
    merged = merge_holdings(everybodys)
    item_bytes = element_sizes(merged.tensors)
    objects = tuple(tuple(each.stored_name for each in rank) for rank in agreed.objects)
    return DryRun(
        unique_bytes=int(agreed.shared.regions.num_bytes(item_bytes).sum()),
        ranks=tuple(_parts(agreed.shared, merged, item_bytes)),
        pieces=tuple(_written(agreed.shared, item_bytes)),
        objects=objects,
    )


def _parts(shared: SharedSavePlan, merged: MergedHoldings, item_bytes: Ints) -> list[RankTraffic]:
    options = LoadOptions()
    wanted = [merged.regions.take(merged.rank == rank) for rank in range(shared.num_ranks)]
    plan = plan_load(_as_stored(shared, item_bytes), item_bytes, wanted, options)
    parts = []
    for rank, regions in enumerate(wanted):
        own = plan_rank_load(plan, item_bytes, rank, options)
        parts.append(
            RankTraffic(
                rank=rank,
                holds_bytes=_sum(regions, item_bytes),
                writes_bytes=_sum(shared.regions.take(shared.rank == rank), item_bytes),
                reads_bytes=_sum(own.regions, item_bytes),
                receives_bytes=_sum(own.receives.regions, item_bytes),
            )
        )
    return parts


def _as_stored(shared: SharedSavePlan, item_bytes: Ints) -> StoredRegions:
    """The checkpoint that this plan would make, with one file a rank and no envelopes."""
    size = shared.regions.num_bytes(item_bytes)
    end = np.cumsum(size)
    packed = np.zeros(len(size), dtype=np.bool_)
    return StoredRegions(shared.regions, shared.rank, end - size, size, end - size, packed)


def _sum(regions: Regions, item_bytes: Ints) -> int:
    return int(regions.num_bytes(item_bytes).sum())


def _written(shared: SharedSavePlan, item_bytes: Ints) -> list[PlannedWrite]:
    size = shared.regions.num_bytes(item_bytes)
    found = []
    for row in np.argsort(shared.regions.tensor, kind="stable").tolist():
        facts = shared.tensors[int(shared.regions.tensor[row])]
        offsets, sizes = shared.regions.region(row, len(facts.shape))
        found.append(
            PlannedWrite(
                tensor=facts.name,
                dtype=facts.dtype,
                shape=facts.shape,
                rank=int(shared.rank[row]),
                offsets=offsets,
                sizes=sizes,
                size_bytes=int(size[row]),
            )
        )
    return found


def _ranges(piece: PlannedWrite) -> str:
    """As numpy would slice it: `[0:512, :]`."""
    if not piece.shape:
        return "its one element"
    slices: Sequence[str] = [
        ":" if (begin, extent) == (0, whole) else f"{begin}:{begin + extent}"
        for begin, extent, whole in zip(piece.offsets, piece.sizes, piece.shape, strict=True)
    ]
    return f"[{', '.join(slices)}], {format_bytes(piece.size_bytes)}"
