"""A save from the tensors of a state to files that are ready to commit.

The steps of a save, in order:

1. `Saver.prepare`: each rank lists its tensors and objects (`state.tensors`), and all ranks agree who writes
   what (`SavePlanCache`).
2. `TensorSave.stage`: each lays out its files (`file_layout`), and copying to staging memory begins
   (`staging`), through `pipeline`. That both have gone well on all ranks is one agreement.
3. `StagedFiles.write_to`: buffers go to storage, each file is made durable, and each item gets a checksum.
4. `TensorSave.seal`: rank 0 describes what all ranks wrote, in `.metadata` for torch and in our manifest.
5. `commit.transaction.write_and_commit` writes both, `.metadata` last because readers take its presence for a
   complete checkpoint, and makes all of it visible at once.

`TorchEngine` gives a manager this and the loader. Invariant: an error on any rank, for example an object that
cannot be pickled, is raised on all ranks before anything is written.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast, get_args
from weakref import WeakKeyDictionary

import numpy as np
import xxhash

from penstock import __version__
from penstock.checkpoint.commit.catalog import CheckpointRef
from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.engine import (
    LoadChoice,
    Replicas,
    SaveChoice,
    ShareContents,
    State,
    Urgency,
    WrittenShare,
)
from penstock.checkpoint.formats.dcp_item import require_known_transforms
from penstock.checkpoint.formats.dcp_metadata import DcpMetadata, paused_garbage_collection
from penstock.checkpoint.formats.manifest import Fact, Manifest, build_manifest, manifest_bytes
from penstock.checkpoint.formats.metadata_writing import metadata_bytes
from penstock.checkpoint.loading.loader import CheckpointLoader, LoadReport
from penstock.checkpoint.plan import save_plan
from penstock.checkpoint.plan.shared_objects import (
    SharedObjects,
    compare_entries,
    names_of_objects,
    share_objects,
)
from penstock.checkpoint.plan.shared_plan import Numbers, Path, Place, RankShare, digest_tensors, plan_share
from penstock.checkpoint.saving import file_layout
from penstock.checkpoint.saving.replicas import compare_replicas
from penstock.checkpoint.saving.shared_description import RankDescription, SpanReader, describe
from penstock.checkpoint.saving.staging import (
    CopyOrder,
    SaveShare,
    StagedFiles,
    choose_pipeline_settings,
)
from penstock.checkpoint.state.process_group import RankGroup
from penstock.checkpoint.state.regions import (
    CheckpointIndex,
    Regions,
    StoredObject,
    StoredRegions,
)
from penstock.checkpoint.state.tensors import (
    LocalState,
    collect_for_save,
    device_mesh_sizes,
    tell_of_entries,
    warn_of_losses,
)
from penstock.checkpoint.state.walk import OWN_ENTRIES
from penstock.cluster import rounds
from penstock.cluster.comm import Comm, run_on_all_ranks
from penstock.cluster.rounds import Round, Rounds
from penstock.errors import UsageError
from penstock.progress import Progress
from penstock.storage.aligned import round_up
from penstock.transfer.buffers import StagingMemory

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

NUM_KEPT_PLANS = 4
"""Enough for the few kinds of state of a trainer, as its model with and without the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgreedSave:
    """What one rank writes; all ranks together write every byte of the state once."""

    share: RankShare
    objects: tuple[save_plan.PlacedObject, ...]
    plan: save_plan.SavePlan
    """Both, divided among the rank's files."""
    facts: Mapping[str, Fact]
    """What else the manifest says as long as the plan holds; on rank 0."""


@dataclass(frozen=True, slots=True, eq=False)
class _KeptPlan:
    """A plan that holds while all ranks hold the same as when it was made: `number` counts a job's plans."""

    number: int
    share: RankShare
    objects: SharedObjects
    facts: Mapping[str, Fact] = field(default_factory=dict)


class SavePlanCache:
    """Plans the saves of one communicator's ranks, and keeps the last few plans.

    While nothing changes, ranks compare digests: no rank receives more than 51 bytes.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._plans: OrderedDict[bytes, _KeptPlan] = OrderedDict()
        self._last_number = 0
        self.num_planned = 0
        """How often a plan had to be made."""

    def agree(
        self, holdings: save_plan.Holdings, options: save_plan.SaveOptions, paths: Mapping[str, Path]
    ) -> AgreedSave:
        """Collective: what this rank writes of what all hold. Raises the same on all ranks.

        `paths` are the places of its tensors in the state.
        """
        return self.find(holdings, options) or self.plan(holdings, options, paths)

    def find(self, holdings: save_plan.Holdings | None, options: save_plan.SaveOptions) -> AgreedSave | None:
        """Collective: `agree` if all ranks have that plan already; a rank that cannot save holds None."""
        place = Place(self._comm.rank, self._comm.size)
        key = b"" if holdings is None else _digest_holdings(holdings, options)
        kept = self._plans.get(key)
        known = bytes(24)
        if holdings is not None and kept is not None:
            known = _digest_number(kept.number) + kept.objects.digest(holdings)
        equal = rounds.all_equal(*place, known, is_known=kept is not None)
        if not self._comm.carry(equal, awaiting=AWAITED):
            return None
        assert holdings is not None, "what is not known equals nothing"
        assert kept is not None, "as above"
        return self._keep(key, replace(kept, objects=kept.objects.updated(holdings)), options)

    def plan(
        self, holdings: save_plan.Holdings, options: save_plan.SaveOptions, paths: Mapping[str, Path]
    ) -> AgreedSave:
        """Collective: `agree` where `find` has found nothing."""
        place, key = Place(self._comm.rank, self._comm.size), _digest_holdings(holdings, options)
        kept = self._comm.carry(
            self._update_or_plan(place, self._plans.get(key), holdings, options, paths),
            awaiting="all ranks to describe what they hold",
        )
        return self._keep(key, kept, options)

    def _update_or_plan(
        self,
        place: Place,
        kept: _KeptPlan | None,
        holdings: save_plan.Holdings,
        options: save_plan.SaveOptions,
        paths: Mapping[str, Path],
    ) -> Rounds[_KeptPlan]:
        """The plan, which may hold though objects have changed."""
        objects = yield from share_objects(place, holdings)
        is_known = kept is not None and kept.objects.own_tensors == objects.own_tensors
        number = _digest_number(kept.number if kept else 0)
        if (yield from rounds.all_equal(*place, number, is_known=is_known)):
            assert kept is not None, "what is not known equals nothing"
            return replace(kept, objects=objects)
        return (yield from self._plan(place, holdings, options, paths, objects))

    def _keep(self, key: bytes, kept: _KeptPlan, options: save_plan.SaveOptions) -> AgreedSave:
        self._plans[key] = kept
        self._plans.move_to_end(key)
        while len(self._plans) > NUM_KEPT_PLANS:
            self._plans.popitem(last=False)
        share, objects = kept.share, kept.objects.placed
        plan = save_plan.plan_files(self._comm.rank, share.tensors, share.regions, objects, options)
        return AgreedSave(share=share, objects=objects, plan=plan, facts=kept.facts)

    def compare_entries(self, agreed: AgreedSave, names: frozenset[str]) -> AgreedSave:
        """Collective: the save that was just planned, and whose entries are not those of all ranks."""
        place = Place(self._comm.rank, self._comm.size)
        compared = self._comm.carry(compare_entries(place, names), awaiting=AWAITED)
        tell_of_entries(compared.parts, are_noted=bool(compared.text))
        facts = {OWN_ENTRIES: compared.text} if compared.text else {}
        key = next(reversed(self._plans))
        self._plans[key] = replace(self._plans[key], facts=facts)
        return replace(agreed, facts=facts)

    def _plan(
        self,
        place: Place,
        holdings: save_plan.Holdings,
        options: save_plan.SaveOptions,
        paths: Mapping[str, Path],
        objects: SharedObjects,
    ) -> Rounds[_KeptPlan]:
        holdings = save_plan.rename_own_tensors(holdings, objects.own_tensors, place.rank)
        holdings = save_plan.without_own_objects(holdings, objects.placed)
        share = yield from plan_share(place, holdings, paths, options)
        # A rank that joined later, or lost its plans, counts on with the others.
        (last,) = yield from rounds.largest_of_all(*place, [self._last_number])
        self._last_number = last + 1
        self.num_planned += 1
        return _KeptPlan(last + 1, share, objects)


def _digest_number(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _digest_holdings(holdings: save_plan.Holdings, options: save_plan.SaveOptions) -> bytes:
    digest = xxhash.xxh3_128(digest_tensors(holdings.tensors))
    digest.update(repr(options).encode() + names_of_objects(holdings))
    regions = holdings.regions
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

    @paused_garbage_collection()
    def prepare(self, state: State, group: RankGroup, choice: SaveChoice) -> TensorSave:
        """Let all ranks agree who writes what of `state`. Collective."""
        start_s = time.perf_counter()
        comm = group.comm
        planner = self._planners.setdefault(comm, SavePlanCache(comm))
        agreed: AgreedSave | None = None

        def find_plan(collected: LocalState | None) -> bool:
            nonlocal agreed
            agreed = planner.find(collected.holdings if collected else None, self._options)
            return agreed is not None

        local_state = run_on_all_ranks(
            comm,
            lambda: collect_for_save(state, only=choice.only, dtype=choice.dtype, is_alone=comm.size == 1),
            awaiting=AWAITED,
            agree=find_plan,
        )
        warn_of_losses(local_state, comm.rank, self._told)
        compare_s = compare_replicas(local_state, comm) if self._replicas == "compare" else 0.0
        paths = {leaf.name: leaf.path for leaf in local_state.leaves}
        num_planned = planner.num_planned
        agreed = agreed or planner.plan(local_state.holdings, self._options, paths)
        if planner.num_planned > num_planned and comm.size > 1:
            agreed = planner.compare_entries(agreed, local_state.entries())
        return TensorSave(
            numbers=agreed.share.numbers,
            make_share=partial(self._share, agreed, paths, local_state, choice),
            compare_s=compare_s,
            plan_s=time.perf_counter() - start_s - compare_s,
            memory=self._memory,
            num_ranks=comm.size,
            mesh=device_mesh_sizes(local_state.leaves),
            writers=self._options.writers,
            transforms=self._transforms,
            timeout_s=comm.timeout_s,
            own_facts={**local_state.facts(), **agreed.facts},
            order=tuple(paths),
        )

    def _share(
        self, agreed: AgreedSave, paths: Mapping[str, Path], local_state: LocalState, choice: SaveChoice
    ) -> SaveShare:
        plan = agreed.plan
        layouts = [file_layout.lay_out_file(bucket, plan.tensors) for bucket in plan.buckets]
        files = [
            (layout, _payloads(bucket, plan, local_state, choice.dtype))
            for layout, bucket in zip(layouts, plan.buckets, strict=True)
        ]
        share = SaveShare(
            rank=plan.rank,
            layouts=tuple(layout for layout, _ in files),
            payloads={layout.name: payloads for layout, payloads in files},
            payload_bytes=plan.num_bytes,
            contents=_describe_contents(agreed, paths),
        )
        return share.transformed(self._transforms)

    def close(self) -> None:
        """Free idle memory. May be called twice."""
        self._memory.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorSave:
    """A `PreparedSave` of tensors in this process."""

    numbers: Numbers
    make_share: Callable[[], SaveShare]
    compare_s: float
    plan_s: float
    memory: StagingMemory
    num_ranks: int
    mesh: Mapping[str, int]
    writers: int
    transforms: tuple[str, ...]
    timeout_s: float
    own_facts: Mapping[str, Fact]
    order: Sequence[str]
    """The names of this rank in the order of its state, which a load gives to new dicts."""
    """What rank 0 adds to the facts of the commit."""

    def stage(self, urgent: Urgency = "copy") -> StagedFiles:
        """Lay out this rank's share, and begin to copy it, unless only the commit is urgent."""
        start_s = time.perf_counter()
        with paused_garbage_collection():
            share = self.make_share()
        plan_s = self.plan_s + time.perf_counter() - start_s
        share = replace(share, compare_s=self.compare_s, plan_s=plan_s)
        budget_bytes = self.memory.budget_bytes
        if urgent == "commit":
            budget_bytes = min(budget_bytes, WAITING_BUFFER_BYTES)
        layouts = share.layouts
        settings = choose_pipeline_settings(layouts, self.writers, budget_bytes)
        copies: CopyOrder = "with the writes"
        if urgent == "copy":
            needed_bytes = sum(round_up(layout.size_bytes, settings.chunk_bytes) for layout in layouts)
            copies = "before all else" if needed_bytes <= settings.buffer_memory_bytes else "at once"
        return StagedFiles(share, self.memory, settings, copies=copies, timeout_s=self.timeout_s)

    def describe(self, place: Place, share: WrittenShare) -> Rounds[RankDescription]:
        """Make this rank's spans of the files that describe the checkpoint."""
        return describe(place, share, self.numbers, self.transforms)

    def seal_parts(
        self,
        description: RankDescription,
        facts: Mapping[str, object],
        receive: Callable[[Round], list[bytes]],
    ) -> SpanReader:
        """On rank 0: metadata and manifest, put together from the spans of all ranks."""
        save_id, step = str(facts.get("save_id", "")), facts.get("step")
        manifest = Manifest(
            step=step if isinstance(step, int) else None,
            save_id=save_id,
            written_by=f"penstock {__version__}",
            world_size=self.num_ranks,
            mesh=self.mesh,
            facts=_named(facts) | dict(self.own_facts),
            metadata_bytes=0,
            metadata_sum=b"",
            names=(),
            files=(),
        )
        return SpanReader(
            description,
            manifest,
            DcpMetadata(index=index_written_files((), packed=False), save_id=save_id),
            receive,
        )

    def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        """On rank 0: metadata and manifest of what all ranks have written."""
        # A million items make millions of short-lived objects, and collecting among them doubles the time.
        with paused_garbage_collection():
            return self._seal(shares, facts)

    def _seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        index = index_written_files(shares, packed=bool(self.transforms))
        found = {facts.name: path for share in shares for facts, path in share.contents.tensors}
        for share in shares:
            found |= dict(each for objects in share.contents.objects for each in objects)
        paths = {name: found[name] for name in self.order if name in found} | found
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
            facts=_named(facts) | dict(self.own_facts),
        )
        return Seal(
            manifest=manifest_bytes(manifest),
            metadata=metadata,
            sizes={file.name: file.size_bytes for share in shares for file in share.files},
        )


def _named(facts: Mapping[str, object]) -> dict[str, Fact]:
    """The facts without those that have fields of their own."""
    return {key: cast("Fact", value) for key, value in facts.items() if key not in ("step", "save_id")}


def index_written_files(shares: Sequence[WrittenShare], *, packed: bool) -> CheckpointIndex:
    """The index of what ranks report to have written, in rank order."""
    written = [
        (file, objects, regions)
        for share in shares
        for file, objects, regions in zip(
            share.files, share.contents.objects, share.contents.regions, strict=True
        )
    ]
    objects: list[StoredObject] = []
    for number, (file, named, _) in enumerate(written):
        for row, (name, _) in enumerate(named):
            offset, size = int(file.item_offset[row]), int(file.item_bytes[row])
            objects.append(StoredObject(name, number, offset, size, packed))
    regions = Regions.concatenated([own for _, _, own in written])
    rows = [(file, slice(len(named), None)) for file, named, _ in written]
    nothing = np.zeros(0, dtype=np.int64)
    stored = StoredRegions(
        regions,
        file=np.repeat(np.arange(len(written)), [len(own) for _, _, own in written]),
        item_offset=np.concatenate([nothing, *(file.item_offset[own] for file, own in rows)]),
        item_bytes=np.concatenate([nothing, *(file.item_bytes[own] for file, own in rows)]),
        payload_offset=np.concatenate([nothing, *(file.payload_offset[own] for file, own in rows)]),
        packed=np.full(len(regions), packed),
    )
    tensors = tuple(facts for share in shares for facts, _ in share.contents.tensors)
    return CheckpointIndex(tensors, stored, tuple(objects), tuple(file.name for file, _, _ in written))


def _payloads(
    bucket: save_plan.Bucket, plan: save_plan.SavePlan, local_state: LocalState, dtype: torch.dtype | None
) -> list[file_layout.Payload]:
    payloads = [file_layout.payload_of_bytes(local_state.objects[placed.name]) for placed in bucket.objects]
    columns = (bucket.regions.tensor, bucket.regions.offsets, bucket.regions.sizes)
    for number, offsets, sizes in zip(*(column.tolist() for column in columns), strict=True):
        facts = plan.tensors[number]
        name, width = save_plan.find_leaf_name(facts.name, local_state.shards), len(facts.shape)
        view = local_state.view(name, tuple(offsets[:width]), tuple(sizes[:width]))
        payloads.append(file_layout.payload_of_tensor(view, dtype if view.is_floating_point() else None))
    return payloads


def _describe_contents(agreed: AgreedSave, paths: Mapping[str, Path]) -> ShareContents:
    numbers = agreed.share.numbers.own
    # An object that differs on this rank has a name of its own, and must not replace the common one.
    stored_paths = {
        placed.stored_name: paths[placed.name] if placed.stored_name == placed.name else (placed.stored_name,)
        for placed in agreed.objects
    }
    return ShareContents(
        tensors=agreed.share.described,
        regions=tuple(
            Regions(numbers[bucket.regions.tensor], bucket.regions.offsets, bucket.regions.sizes)
            for bucket in agreed.plan.buckets
        ),
        objects=tuple(
            tuple((placed.stored_name, stored_paths[placed.stored_name]) for placed in bucket.objects)
            for bucket in agreed.plan.buckets
        ),
    )


class TorchEngine:
    """An `Engine` for nested states of tensors and other values.

    `staging_bytes` limits the memory of a rank's copies.
    """

    def __init__(
        self,
        options: save_plan.SaveOptions | None = None,
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        replicas: Replicas = "share",
    ) -> None:
        self._saver = Saver(options, staging_bytes=staging_bytes, replicas=replicas)
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
        """Free the memory of both directions. May be called twice."""
        self._saver.close()
        self._loader.close()
