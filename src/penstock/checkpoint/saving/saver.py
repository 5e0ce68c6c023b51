"""A save from the tensors of a state to files that are ready to commit.

The steps of a save, in order:

1. `Saver.prepare`: each rank lists its tensors and objects (`state.tensors`), all ranks agree who writes what
   (`SavePlanCache`), and each lays out its files (`file_layout`).
2. `TensorSave.stage`: copying to staging memory begins (`staging`), through `pipeline`.
3. `StagedFiles.write_to`: buffers go to storage, each file is made durable, and each item gets a checksum.
4. `TensorSave.seal`: rank 0 describes what all ranks wrote, in `.metadata` for torch and in our manifest.
5. `commit.transaction.write_and_commit` writes both, `.metadata` last because readers take its presence for a
   complete checkpoint, and makes all of it visible at once.

Invariant: an error on any rank, for example an object that cannot be pickled, is raised on all ranks before
anything is written.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash

from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.engine import NamePatterns, Replicas, SaveChoice, State, Urgency, WrittenShare
from penstock.checkpoint.formats.dcp_item import require_known_transforms
from penstock.checkpoint.formats.dcp_metadata import DcpMetadata, metadata_bytes, paused_garbage_collection
from penstock.checkpoint.formats.manifest import Fact, build_manifest, manifest_bytes
from penstock.checkpoint.plan import save_plan
from penstock.checkpoint.saving import file_layout
from penstock.checkpoint.saving.replicas import compare_replicas
from penstock.checkpoint.saving.staging import SaveShare, StagedFiles, StagingMemory, choose_pipeline_settings
from penstock.checkpoint.state.leaves import Leaf, expand_stateful, flatten_state, matches_pattern
from penstock.checkpoint.state.regions import (
    CheckpointIndex,
    Regions,
    StoredObject,
    StoredRegions,
    TensorFacts,
)
from penstock.checkpoint.state.tensors import (
    LocalState,
    collect_leaves,
    device_mesh_sizes,
    is_tensor,
    number_parameters,
    warn_of_trust,
)
from penstock.cluster.comm import Comm, run_on_all_ranks
from penstock.errors import UsageError
from penstock.storage.aligned import round_up

if TYPE_CHECKING:
    from penstock.checkpoint.state.process_group import RankGroup


NUM_KEPT_PLANS = 4
"""Enough for the few kinds of state of a trainer, as its model with and without the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgreedSave:
    """What all ranks will write; every rank has the same."""

    shared: save_plan.SharedSavePlan
    objects: tuple[tuple[save_plan.PlacedObject, ...], ...]
    """By rank."""
    options: save_plan.SaveOptions

    def plan_of(self, rank: int) -> save_plan.SavePlan:
        """What one rank writes."""
        return save_plan.plan_rank_files(self.shared, self.objects, self.options, only=rank)[0]

    def plans(self) -> list[save_plan.SavePlan]:
        """What each rank writes, in rank order: for rank 0, which describes the whole checkpoint."""
        return save_plan.plan_rank_files(self.shared, self.objects, self.options)


@dataclass(frozen=True, slots=True)
class _HoldingsDigest:
    """What each rank always sends: digests, and its objects, which change from step to step.

    Lists of tensors and regions take megabytes on large jobs and stay the same from save to save, so ranks
    exchange 16-byte digests of them first, and the lists only if a rank does not know the plan.
    """

    tensors: bytes
    holdings: bytes
    objects: tuple[save_plan.HeldObject, ...]
    small: tuple[save_plan.HeldObject, ...]
    numbering: tuple[save_plan.HeldObject, ...]
    known: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _FullHoldings:
    """What each rank sends when a plan is needed; of equal lists of tensors only the first rank's is sent."""

    tensors: tuple[TensorFacts, ...] | None
    regions: Regions


class SavePlanCache:
    """Plans the saves of one communicator's ranks, and keeps the last few plans."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._plans: OrderedDict[bytes, save_plan.SharedSavePlan] = OrderedDict()
        self.num_planned = 0
        """How often a plan had to be made."""

    def agree(self, holdings: save_plan.Holdings, options: save_plan.SaveOptions) -> AgreedSave:
        """Collective: the plan for what all ranks hold. Raises the same on all ranks."""
        tensors_digest = _digest_tensors(holdings.tensors)
        regions_digest = _digest_regions(tensors_digest, holdings.regions, options)
        own = _HoldingsDigest(
            tensors_digest,
            regions_digest,
            holdings.objects,
            holdings.small,
            holdings.numbering,
            tuple(self._plans),
        )
        digests = self._comm.gather(own, awaiting="all ranks to describe what they hold")
        save_plan.require_same_numbering([digest.numbering for digest in digests])
        objects = tuple(
            tuple(placed) for placed in save_plan.assign_objects([digest.objects for digest in digests])
        )
        apart = save_plan.find_own_tensors([digest.small for digest in digests])
        total = xxhash.xxh3_128(b"".join(digest.holdings for digest in digests))
        total.update(repr([(rank, sorted(names)) for rank, names in enumerate(apart) if names]).encode())
        key = total.digest()
        if all(key in digest.known for digest in digests):
            self._plans.move_to_end(key)
        else:
            all_holdings = [
                save_plan.rename_own_tensors(replace(own, small=digest.small), names, rank)
                for rank, (own, digest, names) in enumerate(
                    zip(self._exchange(holdings, digests), digests, apart, strict=True)
                )
            ]
            self._plans[key] = save_plan.plan_save(all_holdings, options)
            self.num_planned += 1
            while len(self._plans) > NUM_KEPT_PLANS:
                self._plans.popitem(last=False)
        return AgreedSave(shared=self._plans[key], objects=objects, options=options)

    def _exchange(
        self, holdings: save_plan.Holdings, digests: Sequence[_HoldingsDigest]
    ) -> list[save_plan.Holdings]:
        first = {digest.tensors: rank for rank, digest in reversed(list(enumerate(digests)))}
        is_first = first[digests[self._comm.rank].tensors] == self._comm.rank
        own = _FullHoldings(holdings.tensors if is_first else None, holdings.regions)
        received = self._comm.gather(own, awaiting="all ranks to list the regions that they hold")
        all_holdings = []
        for digest, full in zip(digests, received, strict=True):
            tensors = received[first[digest.tensors]].tensors
            assert tensors is not None, "the first rank with a list of tensors sends it"
            all_holdings.append(replace(holdings, tensors=tensors, regions=full.regions, objects=()))
        return all_holdings


def _digest_tensors(tensors: Sequence[TensorFacts]) -> bytes:
    rows = (f"{facts.name}\0{facts.dtype}\0{facts.shape}\0{facts.element_bytes}\0" for facts in tensors)
    return xxhash.xxh3_128_digest("".join(rows).encode())


def _digest_regions(tensors_digest: bytes, regions: Regions, options: save_plan.SaveOptions) -> bytes:
    digest = xxhash.xxh3_128(tensors_digest)
    digest.update(repr(options).encode())
    for column in (regions.tensor, regions.offsets, regions.sizes):
        digest.update(repr(column.shape).encode())
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.digest()


AWAITED = "all ranks to list what they hold"

WAITING_BUFFER_BYTES = 128 << 20
"""More buffers make a save that is waited for no faster; object stores need some for parts in flight."""

DEFAULT_STAGING_BYTES = 2 << 30
"""A share larger than this blocks `save_async` until the rest of it is written."""


class Saver:
    """Prepares the saves of one trainer; plans and memory are kept from save to save.

    `staging_bytes` limits the memory of all saves in flight together, beside the state itself. With
    `transforms`, as in `("stream.zstd/1",)`, items are compressed in memory before they are staged. For
    `replicas` see `Replicas`.
    """

    def __init__(
        self,
        options: save_plan.SaveOptions | None = None,
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        transforms: Sequence[str] = (),
        replicas: Replicas = "share",
    ) -> None:
        require_known_transforms(transforms)
        if replicas not in get_args(Replicas):
            raise UsageError(f"replicas={replicas!r} is unknown", fix=f"Use one of {get_args(Replicas)}.")
        self._replicas = replicas
        self._transforms = tuple(transforms)
        self._options = options or save_plan.SaveOptions()
        self._memory = StagingMemory(staging_bytes)
        self._told: set[str] = set()
        self._planners: WeakKeyDictionary[Comm, SavePlanCache] = WeakKeyDictionary()

    def prepare(self, state: State, group: RankGroup, choice: SaveChoice) -> TensorSave:
        """Let all ranks agree who writes what of `state`. Collective."""
        start_s = time.perf_counter()
        comm = group.comm
        local_state = run_on_all_ranks(
            comm, lambda: _collect(state, choice, is_alone=comm.size == 1), awaiting=AWAITED
        )
        warn_of_trust(local_state, comm.rank, self._told)
        compare_s = compare_replicas(local_state, comm) if self._replicas == "compare" else 0.0
        planner = self._planners.setdefault(comm, SavePlanCache(comm))
        agreed = planner.agree(local_state.holdings, self._options)
        share = run_on_all_ranks(
            comm, lambda: self._share(agreed, comm.rank, local_state, choice), awaiting=AWAITED
        )
        return TensorSave(
            agreed=agreed,
            share=replace(share, compare_s=compare_s, plan_s=time.perf_counter() - start_s - compare_s),
            memory=self._memory,
            num_ranks=comm.size,
            mesh=device_mesh_sizes(local_state.leaves),
            writers=self._options.writers,
            transforms=self._transforms,
            timeout_s=comm.timeout_s,
        )

    def _share(self, agreed: AgreedSave, rank: int, local_state: LocalState, choice: SaveChoice) -> SaveShare:
        plan = agreed.plan_of(rank)
        layouts = [file_layout.lay_out_file(bucket, plan.tensors) for bucket in plan.buckets]
        files = [
            (layout, _payloads(bucket, plan, local_state, choice.dtype))
            for layout, bucket in zip(layouts, plan.buckets, strict=True)
        ]
        share = SaveShare(
            rank=rank,
            layouts=tuple(layout for layout, _ in files),
            payloads={layout.name: payloads for layout, payloads in files},
            payload_bytes=plan.num_bytes,
            paths=_own_paths(agreed, plan, local_state),
        )
        return share.transformed(self._transforms)

    def close(self) -> None:
        """Free idle memory. May be called twice."""
        self._memory.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorSave:
    """A `PreparedSave` of tensors in this process."""

    agreed: AgreedSave
    share: SaveShare
    memory: StagingMemory
    num_ranks: int
    mesh: Mapping[str, int]
    writers: int
    transforms: tuple[str, ...]
    timeout_s: float

    def stage(self, urgent: Urgency = "copy") -> StagedFiles:
        """Begin to copy this rank's share."""
        budget_bytes = self.memory.budget_bytes
        if urgent == "commit":
            budget_bytes = min(budget_bytes, WAITING_BUFFER_BYTES)
        layouts = self.share.layouts
        settings = choose_pipeline_settings(layouts, self.writers, budget_bytes)
        needed_bytes = sum(round_up(layout.size_bytes, settings.chunk_bytes) for layout in layouts)
        return StagedFiles(
            self.share,
            self.memory,
            settings,
            copies_first=urgent == "copy" and needed_bytes <= settings.buffer_memory_bytes,
            timeout_s=self.timeout_s,
        )

    def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        """On rank 0: metadata and manifest of what all ranks have written."""
        # A million items make millions of short-lived objects, and collecting among them doubles the time.
        with paused_garbage_collection():
            return self._seal(shares, facts)

    def _seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        index = index_written_files(self.agreed.plans(), shares, packed=bool(self.transforms))
        paths = {name: path for share in shares for name, path in share.paths.items()}
        named = {key: cast("Fact", value) for key, value in facts.items() if key not in ("step", "save_id")}
        save_id, step = str(facts.get("save_id", "")), facts.get("step")
        described = DcpMetadata(index=index, paths=paths, save_id=save_id)
        if self.transforms:
            described = replace(
                described,
                transforms=((), self.transforms),
                row_transform=np.ones(len(index.stored), dtype=np.int64),
                object_transforms={stored.name: self.transforms for stored in index.objects},
            )
        metadata = metadata_bytes(described)
        manifest = build_manifest(
            index,
            [file for share in shares for file in share.files],
            metadata,
            step=step if isinstance(step, int) else None,
            save_id=save_id,
            world_size=self.num_ranks,
            mesh=self.mesh,
            facts=named,
        )
        return Seal(
            manifest=manifest_bytes(manifest),
            metadata=metadata,
            sizes={file.name: file.size_bytes for share in shares for file in share.files},
        )


def index_written_files(
    plans: Sequence[save_plan.SavePlan], shares: Sequence[WrittenShare], *, packed: bool
) -> CheckpointIndex:
    """The index of what was planned and what ranks report to have written; both are in rank order."""
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


def _collect(state: State, choice: SaveChoice, *, is_alone: bool) -> LocalState:
    """What this rank holds of the chosen parts, with the dtypes that they are saved as."""
    local_state = collect_leaves(
        _chosen(flatten_state(expand_stateful(state), is_tensor), choice.only), pack_objects=True
    )
    holdings = local_state.holdings
    if not is_alone and (numbering := number_parameters(state)):
        saved = {facts.name.partition(".state.")[0] for facts in holdings.tensors}
        holdings = replace(holdings, numbering=tuple(held for held in numbering if held.name in saved))
    if choice.dtype is not None:
        tensors = tuple(_as_dtype(facts, choice.dtype) for facts in holdings.tensors)
        holdings = replace(holdings, tensors=tensors)
    return replace(local_state, holdings=holdings)


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
    return replace(facts, dtype=str(dtype).removeprefix("torch."), element_bytes=dtype.itemsize)


def _payloads(
    bucket: save_plan.Bucket, plan: save_plan.SavePlan, local_state: LocalState, dtype: torch.dtype | None
) -> list[file_layout.Payload]:
    payloads = [file_layout.payload_of_bytes(local_state.objects[placed.name]) for placed in bucket.objects]
    for row, number in enumerate(bucket.regions.tensor.tolist()):
        facts = plan.tensors[number]
        name = save_plan.find_leaf_name(facts.name, local_state.shards)
        view = local_state.view(name, *bucket.regions.region(row, len(facts.shape)))
        payloads.append(file_layout.payload_of_tensor(view, dtype if view.is_floating_point() else None))
    return payloads


def _own_paths(
    agreed: AgreedSave, plan: save_plan.SavePlan, local_state: LocalState
) -> dict[str, tuple[str | int, ...]]:
    """The place in the state of each name that this rank is the first to write, so each is sent once."""
    paths = {leaf.name: leaf.path for leaf in local_state.leaves}
    shared = agreed.shared
    numbers, first = np.unique(shared.regions.tensor, return_index=True)
    first_here = numbers[shared.rank[first] == plan.rank].tolist()
    names = [plan.tensors[number].name for number in first_here]
    # A tensor or object that differs on this rank has a name of its own, and must not replace the common one.
    own = {name: paths.get(name, (name,)) for name in names}
    for bucket in plan.buckets:
        for placed in bucket.objects:
            is_common = placed.stored_name == placed.name
            own[placed.stored_name] = paths[placed.name] if is_common else (placed.stored_name,)
    return own
