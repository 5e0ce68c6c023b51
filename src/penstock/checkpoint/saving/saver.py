"""A save from the tensors of a state to files that are ready to commit.

The way of a save, in order:

1. `Saver.prepare`: each rank lists its tensors and objects (`state.tensors`), all ranks agree who writes what
   (`SavePlanCache`), and each lays out its files (`file_layout`).
2. `TensorSave.stage`: copying to staging memory begins (`staging`), through `payloads` and `pipeline`.
3. `StagedFiles.write_to`: buffers go to storage, each file is made durable, and each item has a checksum.
4. `TensorSave.seal`: rank 0 describes what all ranks wrote: `.metadata` for torch, and our manifest.
5. `engine.write_and_commit` makes all of it visible at once.

Invariant: an error on any rank, for example an object that cannot be pickled, is raised on all ranks before
anything is written.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash

from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.engine import NamePatterns, SaveChoice, State, Urgency, WrittenShare
from penstock.checkpoint.formats.dcp_item import require_known_transforms
from penstock.checkpoint.formats.dcp_metadata import DcpMetadata, metadata_bytes, paused_garbage_collection
from penstock.checkpoint.formats.manifest import Fact, build_manifest, manifest_bytes
from penstock.checkpoint.plan.save_plan import (
    Bucket,
    HeldObject,
    Holdings,
    PlacedObject,
    SaveOptions,
    SavePlan,
    SharedSavePlan,
    assign_objects,
    plan_rank_files,
    plan_save,
)
from penstock.checkpoint.saving.file_layout import (
    Payload,
    lay_out_file,
    pack_file,
    payload_of_bytes,
    payload_of_tensor,
)
from penstock.checkpoint.saving.staging import SaveShare, StagedFiles, StagingMemory, pipe_settings
from penstock.checkpoint.state.leaves import Leaf, expand_stateful, flatten_state, matches_pattern
from penstock.checkpoint.state.regions import (
    CheckpointIndex,
    Regions,
    StoredObject,
    StoredRegions,
    TensorFacts,
)
from penstock.checkpoint.state.tensors import LocalState, collect_leaves, device_mesh_sizes, is_tensor
from penstock.cluster.comm import run_on_all_ranks
from penstock.errors import UsageError
from penstock.storage.aligned import round_up

if TYPE_CHECKING:
    from penstock.checkpoint.state.process_group import RankGroup
    from penstock.cluster.comm import Comm


NUM_KEPT_PLANS = 4
"""A trainer saves its model alone and with the optimizer; more kinds of state than this are planned anew."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgreedSave:
    """What all ranks will write, as every rank knows it."""

    shared: SharedSavePlan
    objects: tuple[tuple[PlacedObject, ...], ...]
    """By rank."""
    options: SaveOptions

    def plan_of(self, rank: int) -> SavePlan:
        """What one rank writes."""
        return plan_rank_files(self.shared, self.objects, self.options, only=rank)[0]

    def plans(self) -> list[SavePlan]:
        """What each rank writes, in rank order: for rank 0, which describes the whole checkpoint."""
        return plan_rank_files(self.shared, self.objects, self.options)


@dataclass(frozen=True, slots=True)
class _HoldingsDigest:
    """What each rank always sends: digests, and its objects, which change from step to step."""

    tensors: bytes
    holdings: bytes
    objects: tuple[HeldObject, ...]
    known: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _FullHoldings:
    """What each rank sends where a plan is to be made. Of equal lists of tensors only the first travels."""

    tensors: tuple[TensorFacts, ...] | None
    regions: Regions


class SavePlanCache:
    """Plans saves of one communicator's ranks, and remembers the last few plans."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._plans: OrderedDict[bytes, SharedSavePlan] = OrderedDict()
        self.num_planned = 0
        """How often a plan had to be made; for figures and tests."""

    def agree(self, holdings: Holdings, options: SaveOptions) -> AgreedSave:
        """Collective: the plan for what all ranks hold. Raises the same on all ranks."""
        table = _digest_tensors(holdings.tensors)
        mine = _HoldingsDigest(
            table, _digest_boxes(table, holdings.regions, options), holdings.objects, tuple(self._plans)
        )
        outlines = self._comm.gather(mine, awaiting="all ranks to say what they hold")
        objects = tuple(tuple(each) for each in assign_objects([each.objects for each in outlines]))
        key = xxhash.xxh3_128_digest(b"".join(each.holdings for each in outlines))
        if all(key in each.known for each in outlines):
            self._plans.move_to_end(key)
            return AgreedSave(shared=self._plans[key], objects=objects, options=options)
        shared = plan_save(self._exchange(holdings, outlines), options)
        self.num_planned += 1
        self._plans[key] = shared
        while len(self._plans) > NUM_KEPT_PLANS:
            self._plans.popitem(last=False)
        return AgreedSave(shared=shared, objects=objects, options=options)

    def _exchange(self, holdings: Holdings, outlines: Sequence[_HoldingsDigest]) -> list[Holdings]:
        first = {each.tensors: rank for rank, each in reversed(list(enumerate(outlines)))}
        speaks = first[outlines[self._comm.rank].tensors] == self._comm.rank
        whole = _FullHoldings(holdings.tensors if speaks else None, holdings.regions)
        wholes = self._comm.gather(whole, awaiting="all ranks to say what they hold, piece by piece")
        found = []
        for outline, each in zip(outlines, wholes, strict=True):
            tensors = wholes[first[outline.tensors]].tensors
            assert tensors is not None, "the first rank with a list of tensors sends it"
            found.append(replace(holdings, tensors=tensors, regions=each.regions, objects=()))
        return found


def _digest_tensors(tensors: Sequence[TensorFacts]) -> bytes:
    lines = (f"{each.name}\0{each.dtype}\0{each.shape}\0{each.item_bytes}\0" for each in tensors)
    return xxhash.xxh3_128_digest("".join(lines).encode())


def _digest_boxes(table: bytes, regions: Regions, options: SaveOptions) -> bytes:
    digest = xxhash.xxh3_128(table)
    digest.update(repr(options).encode())
    for column in (regions.tensor, regions.offsets, regions.sizes):
        digest.update(repr(column.shape).encode())
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.digest()


AWAITED = "all ranks to look at what they hold"

WAITING_BUFFER_BYTES = 128 << 20
"""Where the caller waits for the commit, more make nothing faster; object stores keep some in flight."""

DEFAULT_STAGING_BYTES = 2 << 30
"""A larger share than this blocks `save_async` until the rest of it is written."""


class Saver:
    """Prepares the saves of one trainer; its plans and its memory last from save to save.

    `staging_bytes` bounds what all its saves under way take together, beside the state itself. With
    `transforms`, as in `("stream.zstd/1",)`, items are packed in memory before they are staged.
    """

    def __init__(
        self,
        options: SaveOptions | None = None,
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        transforms: Sequence[str] = (),
    ) -> None:
        require_known_transforms(transforms)
        self._transforms = tuple(transforms)
        self._options = options or SaveOptions()
        self._memory = StagingMemory(staging_bytes)
        self._planners: WeakKeyDictionary[Comm, SavePlanCache] = WeakKeyDictionary()

    def prepare(self, state: State, group: RankGroup, choice: SaveChoice) -> TensorSave:
        """Let all ranks agree who writes what of `state`. Collective."""
        began_s = time.perf_counter()
        comm = group.comm
        local_state = run_on_all_ranks(comm, lambda: _collect(state, choice), awaiting=AWAITED)
        planner = self._planners.setdefault(comm, SavePlanCache(comm))
        agreed = planner.agree(local_state.holdings, self._options)
        share = run_on_all_ranks(
            comm, lambda: self._share(agreed, comm.rank, local_state, choice), awaiting=AWAITED
        )
        return TensorSave(
            agreed,
            replace(share, plan_s=time.perf_counter() - began_s),
            self._memory,
            num_ranks=comm.size,
            mesh=device_mesh_sizes(local_state.leaves),
            writers=self._options.writers,
            transforms=self._transforms,
            timeout_s=comm.timeout_s,
        )

    def _share(self, agreed: AgreedSave, rank: int, local_state: LocalState, choice: SaveChoice) -> SaveShare:
        plan = agreed.plan_of(rank)
        layouts = [lay_out_file(bucket, plan.tensors) for bucket in plan.buckets]
        payloads = [_payloads(bucket, plan, local_state, choice.dtype) for bucket in plan.buckets]
        if self._transforms:
            packed = [
                pack_file(layout, of_file, self._transforms)
                for layout, of_file in zip(layouts, payloads, strict=True)
            ]
            layouts, payloads = [layout for layout, _ in packed], [of_file for _, of_file in packed]
        return SaveShare(
            rank=rank,
            layouts=tuple(layouts),
            payloads={layout.name: of_file for layout, of_file in zip(layouts, payloads, strict=True)},
            payload_bytes=plan.num_bytes,
            paths=_own_paths(agreed, plan, local_state),
        )

    def close(self) -> None:
        """Let go of idle memory. Safe twice."""
        self._memory.clear()


class TensorSave:
    """A `PreparedSave` of tensors in this process."""

    def __init__(
        self,
        agreed: AgreedSave,
        share: SaveShare,
        memory: StagingMemory,
        *,
        num_ranks: int,
        mesh: Mapping[str, int],
        writers: int,
        transforms: tuple[str, ...],
        timeout_s: float,
    ) -> None:
        self._transforms = transforms
        self._agreed = agreed
        self._share = share
        self._memory = memory
        self._num_ranks = num_ranks
        self._mesh = mesh
        self._writers = writers
        self._timeout_s = timeout_s

    def stage(self, urgent: Urgency = "copy") -> StagedFiles:
        """Begin to copy this rank's share."""
        budget_bytes = self._memory.budget_bytes
        if urgent == "commit":
            budget_bytes = min(budget_bytes, WAITING_BUFFER_BYTES)
        settings = pipe_settings(self._share.layouts, self._writers, budget_bytes)
        needed_bytes = sum(
            round_up(layout.size_bytes, settings.chunk_bytes) for layout in self._share.layouts
        )
        return StagedFiles(
            self._share,
            self._memory,
            settings,
            copies_first=urgent == "copy" and needed_bytes <= settings.buffer_memory_bytes,
            timeout_s=self._timeout_s,
        )

    def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        """On rank 0: metadata and manifest of what all ranks have written."""
        # A million items make millions of short-lived objects, and collecting among them doubles the time.
        with paused_garbage_collection():
            return self._seal(shares, facts)

    def _seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        index = index_written_files(self._agreed.plans(), shares, packed=bool(self._transforms))
        paths = {name: path for share in shares for name, path in share.paths.items()}
        named = {key: cast("Fact", value) for key, value in facts.items() if key not in ("step", "save_id")}
        save_id, step = str(facts.get("save_id", "")), facts.get("step")
        described = DcpMetadata(index=index, paths=paths, save_id=save_id)
        if self._transforms:
            described = replace(
                described,
                transforms=((), self._transforms),
                row_transform=np.ones(len(index.stored), dtype=np.int64),
                object_transforms={each.name: self._transforms for each in index.objects},
            )
        metadata = metadata_bytes(described)
        manifest = build_manifest(
            index,
            [file for share in shares for file in share.files],
            metadata,
            step=step if isinstance(step, int) else None,
            save_id=save_id,
            world_size=self._num_ranks,
            mesh=self._mesh,
            facts=named,
        )
        return Seal(
            manifest=manifest_bytes(manifest),
            metadata=metadata,
            sizes={file.name: file.size_bytes for share in shares for file in share.files},
        )


def index_written_files(
    plans: Sequence[SavePlan], shares: Sequence[WrittenShare], *, packed: bool
) -> CheckpointIndex:
    """Where everything lies, from what was planned and what ranks report; both are in rank order."""
    pairs = [
        (bucket, file)
        for plan, share in zip(plans, shares, strict=True)
        for bucket, file in zip(plan.buckets, share.files, strict=True)
    ]
    objects: list[StoredObject] = []
    for number, (bucket, file) in enumerate(pairs):
        for row, placed in enumerate(bucket.objects):
            offset, size = int(file.item_offset[row]), int(file.item_bytes[row])
            objects.append(StoredObject(placed.stored_name, number, offset, size, packed))
    regions = Regions.concatenated([bucket.regions for bucket, _ in pairs])
    rows = [(file, slice(len(bucket.objects), None)) for bucket, file in pairs]
    nothing = np.zeros(0, dtype=np.int64)
    stored = StoredRegions(
        regions,
        file=np.repeat(np.arange(len(pairs)), [len(bucket.regions) for bucket, _ in pairs]),
        item_offset=np.concatenate([nothing, *(file.item_offset[own] for file, own in rows)]),
        item_bytes=np.concatenate([nothing, *(file.item_bytes[own] for file, own in rows)]),
        payload_offset=np.concatenate([nothing, *(file.payload_offset[own] for file, own in rows)]),
        packed=np.full(len(regions), packed),
    )
    tensors = plans[0].tensors if plans else ()
    return CheckpointIndex(tensors, stored, tuple(objects), tuple(file.name for _, file in pairs))


def _collect(state: State, choice: SaveChoice) -> LocalState:
    """What this rank holds of what is to be saved, with the dtypes that it is to be saved as."""
    local_state = collect_leaves(
        _chosen(flatten_state(expand_stateful(state), is_tensor), choice.only), pack_objects=True
    )
    if choice.dtype is None:
        return local_state
    tensors = tuple(_as_dtype(facts, choice.dtype) for facts in local_state.holdings.tensors)
    return replace(local_state, holdings=replace(local_state.holdings, tensors=tensors))


def _chosen(leaves: Sequence[Leaf], only: NamePatterns | None) -> Sequence[Leaf]:
    if only is None:
        return leaves
    chosen = [leaf for leaf in leaves if matches_pattern(leaf.name, only)]
    if leaves and not chosen:
        raise UsageError(
            f"No part of the state matches only={only!r}",
            fix=f"Names are keys joined by dots, for example {leaves[0].name!r}.",
        )
    return chosen


def _as_dtype(facts: TensorFacts, dtype: torch.dtype) -> TensorFacts:
    if not getattr(torch, facts.dtype).is_floating_point:
        return facts
    return replace(facts, dtype=str(dtype).removeprefix("torch."), item_bytes=dtype.itemsize)


def _payloads(
    bucket: Bucket, plan: SavePlan, local_state: LocalState, dtype: torch.dtype | None
) -> list[Payload]:
    payloads = [payload_of_bytes(local_state.objects[placed.name]) for placed in bucket.objects]
    for row, number in enumerate(bucket.regions.tensor.tolist()):
        facts = plan.tensors[number]
        view = local_state.view(facts.name, *bucket.regions.region(row, len(facts.shape)))
        payloads.append(payload_of_tensor(view, dtype if view.is_floating_point() else None))
    return payloads


def _own_paths(
    agreed: AgreedSave, plan: SavePlan, local_state: LocalState
) -> dict[str, tuple[str | int, ...]]:
    """The places of what this rank is the first to write: together, ranks tell each once."""
    paths = {leaf.name: leaf.path for leaf in local_state.leaves}
    shared = agreed.shared
    numbers, first = np.unique(shared.regions.tensor, return_index=True)
    mine = numbers[shared.rank[first] == plan.rank].tolist()
    own = {plan.tensors[number].name: paths[plan.tensors[number].name] for number in mine}
    for bucket in plan.buckets:
        for placed in bucket.objects:
            # An object of one rank alone has a name of its own and would displace the common one.
            is_common = placed.stored_name == placed.name
            own[placed.stored_name] = paths[placed.name] if is_common else (placed.stored_name,)
    return own
