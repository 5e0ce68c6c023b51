"""A save from the tensors of a state to files that are ready to commit: prepare, stage, write, seal.

1. `Saver.prepare`: each rank lists its tensors and objects (`state.tensors`), and all ranks agree who writes
   what (`plan.agree`).
2. `PreparedTensors.stage`: each rank lays out its files (`saving.file_layout`), and copying to staging memory
   begins (`saving.staging`).
3. `StagedFiles.write_to`: buffers go to storage, each file is made durable, and each item gets a checksum.
4. `PreparedTensors.seal`: rank 0 describes what all ranks wrote, in `.metadata` and in our manifest.

`commit.transaction` then makes all of it visible at once. Invariant: an error on any rank, for example an
object that cannot be pickled, is raised on all ranks before anything is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast, get_args
from weakref import WeakKeyDictionary

import numpy as np

from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.engine import Replicas, SaveChoice, ShareContents, State, Urgency, WrittenShare
from penstock.checkpoint.formats.dcp_item import require_known_transforms
from penstock.checkpoint.formats.dcp_metadata import MetadataWriter, paused_garbage_collection
from penstock.checkpoint.formats.manifest import Fact, build_manifest, manifest_bytes
from penstock.checkpoint.plan.agree import AgreedSave, JobPlanner
from penstock.checkpoint.plan.save_plan import Bucket, SaveOptions, find_leaf_name
from penstock.checkpoint.saving.file_layout import Payload, lay_out_file, payload_of_bytes, payload_of_tensor
from penstock.checkpoint.saving.replicas import compare_replicas
from penstock.checkpoint.saving.staging import CopyOrder, SaveShare, StagedFiles, choose_pipeline_settings
from penstock.checkpoint.state.process_group import RankGroup
from penstock.checkpoint.state.regions import CheckpointIndex, Regions, StoredObject, StoredRegions
from penstock.checkpoint.state.tensors import (
    LocalState,
    collect_for_save,
    device_mesh_sizes,
    tell_of_entries,
    warn_of_losses,
)
from penstock.checkpoint.state.walk import OWN_ENTRIES
from penstock.cluster.comm import Comm
from penstock.errors import UsageError
from penstock.storage.aligned import round_up
from penstock.transfer.buffers import StagingMemory

if TYPE_CHECKING:
    import torch

WAITING_BUFFER_BYTES = 128 << 20
"""More buffers make a save that is waited for no faster; object stores need some for parts in flight."""

DEFAULT_STAGING_BYTES = 2 << 30
"""A share larger than this blocks `save_async` until the rest of it is written."""


class Saver:
    """Prepares the saves of one trainer; plans and memory are kept from save to save.

    `staging_bytes` limits the memory of all saves in flight together, in addition to the state itself. With
    `transforms`, as in `("stream.zstd/1",)`, items are compressed in memory before they are staged. For
    `replicas` see `Replicas`.
    """

    def __init__(
        self,
        options: SaveOptions | None = None,
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
        self._options = options or SaveOptions()
        self._memory = StagingMemory(staging_bytes)
        self._metadata = MetadataWriter()
        self._warned: set[str] = set()
        self._planners: WeakKeyDictionary[Comm, JobPlanner] = WeakKeyDictionary()

    @paused_garbage_collection()
    def prepare(self, state: State, group: RankGroup, choice: SaveChoice) -> PreparedTensors:
        """Let all ranks agree who writes what of `state`. Collective."""
        start_s = time.perf_counter()
        comm = group.comm
        planner = self._planners.setdefault(comm, JobPlanner(comm))
        collected: list[LocalState] = []

        def collect() -> LocalState:
            collected.append(
                collect_for_save(state, only=choice.only, dtype=choice.dtype, is_alone=comm.size == 1)
            )
            return collected[0]

        agreed = planner.find(lambda: collect().holdings, self._options)
        local_state = collected[0]
        warn_of_losses(local_state, comm.rank, self._warned)
        compare_s = compare_replicas(local_state, comm) if self._replicas == "compare" else 0.0
        if agreed is None:
            paths = {leaf.name: leaf.path for leaf in local_state.leaves}
            agreed = planner.plan(local_state.holdings, self._options, paths, local_state.entries())
            if agreed.job is not None:
                tell_of_entries(agreed.job.differing_parts, are_noted=bool(agreed.job.entries))
        return PreparedTensors(
            agreed=agreed,
            local_state=local_state,
            dtype=choice.dtype,
            compare_s=compare_s,
            plan_s=time.perf_counter() - start_s - compare_s,
            memory=self._memory,
            num_ranks=comm.size,
            writers=self._options.writers,
            transforms=self._transforms,
            timeout_s=comm.timeout_s,
            metadata=self._metadata,
        )

    def close(self) -> None:
        """Free idle memory. May be called twice."""
        self._memory.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedTensors:
    """A `PreparedSave` of tensors in this process."""

    agreed: AgreedSave
    local_state: LocalState
    dtype: torch.dtype | None
    compare_s: float
    plan_s: float
    memory: StagingMemory
    num_ranks: int
    writers: int
    transforms: tuple[str, ...]
    timeout_s: float
    metadata: MetadataWriter

    def stage(self, urgent: Urgency = "copy") -> StagedFiles:
        """Lay out this rank's share, and begin to copy it, unless only the commit is urgent."""
        start_s = time.perf_counter()
        plan = self.agreed.plan
        with paused_garbage_collection():
            layouts = tuple(lay_out_file(bucket, plan.tensors) for bucket in plan.buckets)
            share = SaveShare(
                rank=plan.rank,
                layouts=layouts,
                payloads={bucket.file: self._payloads(bucket) for bucket in plan.buckets},
                payload_bytes=plan.num_bytes,
                contents=self._contents(),
                compare_s=self.compare_s,
            ).transformed(self.transforms)
        share = replace(share, plan_s=self.plan_s + time.perf_counter() - start_s)
        budget_bytes = self.memory.budget_bytes
        if urgent == "commit":
            budget_bytes = min(budget_bytes, WAITING_BUFFER_BYTES)
        settings = choose_pipeline_settings(share.layouts, self.writers, budget_bytes)
        copies: CopyOrder = "with the writes"
        if urgent == "copy":
            needed_bytes = sum(round_up(layout.size_bytes, settings.chunk_bytes) for layout in share.layouts)
            copies = "before all else" if needed_bytes <= settings.buffer_memory_bytes else "at once"
        return StagedFiles(share, self.memory, settings, copies=copies, timeout_s=self.timeout_s)

    def _payloads(self, bucket: Bucket) -> list[Payload]:
        """Find where the bytes of each item of a file come from: its objects first, then its regions."""
        state, tensors = self.local_state, self.agreed.plan.tensors
        payloads = [payload_of_bytes(state.objects[placed.name]) for placed in bucket.objects]
        columns = (bucket.regions.tensor, bucket.regions.offsets, bucket.regions.sizes)
        for number, offsets, sizes in zip(*(column.tolist() for column in columns), strict=True):
            facts = tensors[number]
            name, width = find_leaf_name(facts.name, state.shards), len(facts.shape)
            view = state.view(name, tuple(offsets[:width]), tuple(sizes[:width]))
            payloads.append(payload_of_tensor(view, self.dtype if view.is_floating_point() else None))
        return payloads

    def _contents(self) -> ShareContents:
        """Describe this rank's files to rank 0; regions have the numbers of all ranks' tensors."""
        paths = {leaf.name: leaf.path for leaf in self.local_state.leaves}
        numbers = self.agreed.share.numbers
        return ShareContents(
            regions=tuple(
                Regions(numbers[bucket.regions.tensor], bucket.regions.offsets, bucket.regions.sizes)
                for bucket in self.agreed.plan.buckets
            ),
            # An object that differs on this rank has a name of its own, and must not replace the common one.
            objects=tuple(
                tuple(
                    (
                        each.stored_name,
                        paths[each.name] if each.stored_name == each.name else (each.stored_name,),
                    )
                    for each in bucket.objects
                )
                for bucket in self.agreed.plan.buckets
            ),
        )

    def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        """On rank 0: metadata and manifest of what all ranks have written."""
        # A million items make millions of short-lived objects, and collecting among them doubles the time.
        with paused_garbage_collection():
            return self._seal(shares, facts)

    def _seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        job = self.agreed.job
        assert job is not None, "rank 0 made the plan"
        index = self._index(shares)
        found = dict(job.paths)
        for share in shares:
            found |= dict(each for objects in share.contents.objects for each in objects)
        # In the order of rank 0's state, which a load gives to new dicts.
        order = [leaf.name for leaf in self.local_state.leaves]
        paths = {name: found[name] for name in order if name in found} | found
        save_id, step = str(facts.get("save_id", "")), facts.get("step")
        index = replace(index, paths=paths)
        metadata = self.metadata.write(index)
        named = {key: cast("Fact", fact) for key, fact in facts.items() if key not in ("step", "save_id")}
        manifest = build_manifest(
            index,
            [file for share in shares for file in share.files],
            metadata,
            step=step if isinstance(step, int) else None,
            save_id=save_id,
            world_size=self.num_ranks,
            mesh=device_mesh_sizes(self.local_state.leaves),
            facts=named | self.local_state.facts() | ({OWN_ENTRIES: job.entries} if job.entries else {}),
        )
        return Seal(
            manifest=manifest_bytes(manifest),
            metadata=metadata,
            sizes={file.name: file.size_bytes for share in shares for file in share.files},
        )

    def _index(self, shares: Sequence[WrittenShare]) -> CheckpointIndex:
        """The index of what ranks report to have written, in rank order."""
        assert self.agreed.job is not None, "rank 0 made the plan"
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
                objects.append(StoredObject(name, number, offset, size, self.transforms))
        regions = Regions.concatenated([own for _, _, own in written])
        rows = [(file, slice(len(named), None)) for file, named, _ in written]
        nothing = np.zeros(0, dtype=np.int64)
        stored = StoredRegions(
            regions,
            file=np.repeat(np.arange(len(written)), [len(own) for _, _, own in written]),
            item_offset=np.concatenate([nothing, *(file.item_offset[own] for file, own in rows)]),
            item_bytes=np.concatenate([nothing, *(file.item_bytes[own] for file, own in rows)]),
            payload_offset=np.concatenate([nothing, *(file.payload_offset[own] for file, own in rows)]),
            packed=np.full(len(regions), bool(self.transforms)),
        )
        files = tuple(file.name for file, _, _ in written)
        transforms = [self.transforms] * len(regions) if self.transforms else ()
        return CheckpointIndex(self.agreed.job.tensors, stored, tuple(objects), files, transforms=transforms)
