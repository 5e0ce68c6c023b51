"""A save from the tensors of a state to files that are ready to commit: prepare, stage, write, seal.

1. `Saver.prepare`: each rank lists its tensors and objects (`state.tensors`), and all ranks agree on
   which of them writes what (`plan.save_plan`).
2. `PreparedTensors.stage`: each rank lays out its files (`file_layout`), and copying to staging memory
   begins.
3. `StagedFiles.write_to`: buffers go to storage, each file is made durable, and each item gets a checksum.
4. `PreparedTensors.seal`: rank 0 describes what all ranks wrote, in `.metadata` and in Penstock's manifest.

`commit.checkpoints` then makes everything visible at once. Invariant: if any rank fails before writing, for
example because an object cannot be pickled, all ranks raise the error and nothing is written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Literal, cast, get_args
from weakref import WeakKeyDictionary

import numpy as np

from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.engine import (
    TRANSFER_TIMEOUT_S,
    RankSaveStats,
    Replicas,
    SaveCancelled,
    SaveChoice,
    ShareContents,
    State,
    Urgency,
    WrittenShare,
)
from penstock.checkpoint.file_layout import (
    DeviceStreams,
    FileLayout,
    LayoutFiller,
    Payload,
    lay_out_file,
    open_device_streams,
    pack_file,
    payload_of_bytes,
    payload_of_tensor,
)
from penstock.checkpoint.formats.dcp_item import require_known_transforms
from penstock.checkpoint.formats.description import (
    Fact,
    MetadataWriter,
    WrittenFile,
    build_manifest,
    manifest_bytes,
    paused_garbage_collection,
)
from penstock.checkpoint.plan.save_plan import (
    JobPlan,
    JobPlanner,
    RankShare,
    SaveOptions,
    SavePlan,
    plan_files,
)
from penstock.checkpoint.replica_comparison import add_digests, compare_replicas, warn_of_own_values
from penstock.checkpoint.state.regions import CheckpointIndex, Ints, Regions, StoredObject, StoredRegions
from penstock.checkpoint.state.tensors import (
    LocalState,
    collect_for_save,
    device_mesh_sizes,
    tell_of_entries,
    warn_of_losses,
)
from penstock.checkpoint.state.walk import OWN_ENTRIES, find_leaf_name
from penstock.cluster.comm import Comm
from penstock.errors import UsageError
from penstock.progress import Progress
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.capabilities import prefer_direct_access
from penstock.storage.protocol import Storage
from penstock.transfer.buffers import StagingMemory, WarmMemory, pin_memory
from penstock.transfer.ledger import now_ns
from penstock.transfer.pipeline import (
    MIN_BUFFERS_PER_STREAM,
    PipelineSettings,
    PipelineStopped,
    PlannedObject,
    WritePipeline,
)

if TYPE_CHECKING:
    import torch

WAITING_BUFFER_BYTES = 128 << 20
"""The most memory for buffers of a save that the caller waits for; object storage holds parts in flight."""

DEFAULT_STAGING_BYTES = 2 << 30
"""The memory for copies. If a rank's share is larger, `save_async` blocks until the excess is written."""


class Saver:
    """Prepares the saves of one trainer; plans and memory are kept from save to save.

    `staging_bytes` limits the memory of all saves in flight together, in addition to the state itself. With
    `transforms`, such as `("stream.zstd/1",)`, items are compressed in memory before they are staged.
    `replicas` is described at `Replicas`.
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
        self.transforms = tuple(transforms)
        self.options = options or SaveOptions()
        self.memory = StagingMemory(staging_bytes)
        self.close = self.memory.clear
        """Frees idle memory. May be called twice."""
        self.metadata = MetadataWriter()
        self._warned: set[str] = set()
        self.warn = partial(warn_of_losses, warned=set(), checked=set())
        self._laid_out: tuple[RankShare, SavePlan, tuple[FileLayout, ...]] | None = None
        self._planners: WeakKeyDictionary[Comm, JobPlanner] = WeakKeyDictionary()

    @paused_garbage_collection()
    def prepare(self, state: State, comm: Comm, choice: SaveChoice) -> PreparedTensors:
        """Let all ranks agree on which of them writes which part of `state`. Collective."""
        start_s = time.perf_counter()
        planner = self._planners.setdefault(comm, JobPlanner(comm))
        collected: list[LocalState] = []
        compare_s = 0.0

        def collect() -> LocalState:
            nonlocal compare_s
            local_state = collect_for_save(
                state, only=choice.only, dtype=choice.dtype, is_alone=comm.size == 1
            )
            if comm.size > 1:
                begin_s = time.perf_counter()
                is_strict = self._replicas == "compare"
                local_state = add_digests(local_state, state, comm.job_ranks, only_expected=is_strict)
                compare_s = time.perf_counter() - begin_s
            collected.append(local_state)
            return local_state

        share = planner.find(lambda: collect().holdings, self.options)
        local_state = collected[0]
        compare_s += compare_replicas(local_state, comm) if self._replicas == "compare" else 0.0
        is_new = share is None
        if share is None:
            share = planner.plan(local_state.holdings, self.options)
        job = planner.job
        if is_new and job is not None and comm.size > 1:
            tell_of_entries(job.differing_parts, are_noted=OWN_ENTRIES in job.facts)
            warn_of_own_values(job.tensors, job.paths, comm.size, local_state, self._warned)
        if self._laid_out is None or self._laid_out[0] is not share:
            plan = plan_files(comm.rank, share.tensors, share.regions, share.objects.placed, self.options)
            layouts = tuple(lay_out_file(bucket, plan.tensors) for bucket in plan.buckets)
            self._laid_out = share, plan, layouts
        _, plan, layouts = self._laid_out
        return PreparedTensors(
            plan=plan,
            layouts=layouts,
            numbers=share.numbers,
            job=job,
            local_state=local_state,
            dtype=choice.dtype,
            compare_s=compare_s,
            plan_s=time.perf_counter() - start_s - compare_s,
            saver=self,
            comm=comm,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedTensors:
    """A `PreparedSave` of tensors in this process."""

    plan: SavePlan
    layouts: tuple[FileLayout, ...]
    numbers: Ints
    """For each tensor of the plan, its number among the tensors of all ranks."""
    job: JobPlan | None
    """The plan of all ranks; None except on rank 0."""
    local_state: LocalState
    dtype: torch.dtype | None
    compare_s: float
    plan_s: float
    saver: Saver
    comm: Comm

    def stage(self, urgent: Urgency = "copy") -> StagedFiles:
        """Lay out this rank's share, and begin to copy it unless only the commit is urgent."""
        start_s, plan, state = time.perf_counter(), self.plan, self.local_state
        payloads: dict[str, list[Payload]] = {}
        regions, objects = [], []
        with paused_garbage_collection():
            for bucket in plan.buckets:
                # Objects first, then regions, in the order of the layout.
                payloads[bucket.file] = [
                    payload_of_bytes(state.objects[each.name]) for each in bucket.objects
                ]
                for facts, region in bucket.regions.with_facts(plan.tensors):
                    view = state.view(find_leaf_name(facts.name, state.shards), *region)
                    dtype = self.dtype if view.is_floating_point() else None
                    payloads[bucket.file].append(payload_of_tensor(view, dtype))
                # Regions refer to tensors by their number among those of all ranks.
                regions.append(replace(bucket.regions, tensor=self.numbers[bucket.regions.tensor]))
                # An object that differs on this rank has its own name, and must not replace the common one.
                names = [each.stored_name for each in bucket.objects]
                objects.append(tuple((name, state.holdings.paths.get(name, (name,))) for name in names))
            stats = RankSaveStats(rank=plan.rank, payload_bytes=plan.num_bytes, compare_s=self.compare_s)
            share = SaveShare(
                layouts=self.layouts,
                payloads=payloads,
                stats=stats,
                contents=ShareContents(regions=tuple(regions), objects=tuple(objects)),
            ).transformed(self.saver.transforms)
        plan_s = self.plan_s + time.perf_counter() - start_s
        share = replace(share, stats=replace(stats, plan_s=plan_s))
        memory, writers = self.saver.memory, self.saver.options.writers
        budget_bytes = memory.budget_bytes
        if urgent == "commit":
            budget_bytes = min(budget_bytes, WAITING_BUFFER_BYTES)
        settings = choose_pipeline_settings(share.layouts, writers, budget_bytes)
        copies: CopyOrder = "with the writes"
        if urgent == "copy":
            needed_bytes = sum(round_up(layout.size_bytes, settings.chunk_bytes) for layout in share.layouts)
            copies = "before all else" if needed_bytes <= settings.buffer_memory_bytes else "at once"
        staged = StagedFiles(share, memory, settings, copies=copies, timeout_s=self.comm.timeout_s)
        # While threads copy: training waits for the copies, so everything else is done in the meantime.
        self.saver.warn(state, self.comm.rank)
        return staged

    # A million items create millions of short-lived objects, and collecting garbage meanwhile doubles the
    # time.
    @paused_garbage_collection()
    def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        """On rank 0: return the metadata and manifest of what all ranks have written."""
        job, transforms = self.job, self.saver.transforms
        assert job is not None, "rank 0 made the plan"
        written = [
            (file, objects, regions)
            for share in shares
            for file, objects, regions in zip(
                share.files, share.contents.objects, share.contents.regions, strict=True
            )
        ]
        objects = [
            StoredObject(name, number, int(file.item_offset[row]), int(file.item_bytes[row]), transforms)
            for number, (file, named, _) in enumerate(written)
            for row, (name, _) in enumerate(named)
        ]
        regions = Regions.concatenated([own for _, _, own in written])

        def column(name: str) -> Ints:
            """Return one column of all regions; in each file, they come after the objects."""
            parts = [getattr(file, name)[len(named) :] for file, named, _ in written]
            return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

        stored = StoredRegions(
            regions,
            file=np.repeat(np.arange(len(written)), [len(own) for _, _, own in written]),
            item_offset=column("item_offset"),
            item_bytes=column("item_bytes"),
            payload_offset=column("payload_offset"),
            packed=np.full(len(regions), bool(transforms)),
        )
        # In the order of rank 0's state, which a load gives to new dicts.
        paths = self.local_state.holdings.paths | job.paths | dict(chain(*(named for _, named, _ in written)))
        save_id, step = str(facts.get("save_id", "")), facts.get("step")
        index = CheckpointIndex(
            job.tensors,
            stored,
            tuple(objects),
            tuple(file.name for file, _, _ in written),
            paths,
            transforms=[transforms] * len(regions) if transforms else (),
        )
        metadata = self.saver.metadata.write(index)
        named = {key: cast("Fact", fact) for key, fact in facts.items() if key not in ("step", "save_id")}
        manifest = build_manifest(
            index,
            [file for share in shares for file in share.files],
            metadata,
            step=step if isinstance(step, int) else None,
            save_id=save_id,
            world_size=self.comm.size,
            mesh=device_mesh_sizes(self.local_state.leaves),
            facts={**named, **job.facts},
        )
        return Seal(
            manifest=manifest_bytes(manifest),
            metadata=metadata,
            sizes={file.name: file.size_bytes for share in shares for file in share.files},
        )


MOST_CHUNK_BYTES = 16 << 20
"""The largest write: larger ones are no faster, and the wait for a file's last one would be longer."""

FEW_CHUNKS_BYTES = 8 << 20
"""Files smaller than this are written in two chunks."""

_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveShare:
    """One rank's files, and the sources of their payloads."""

    layouts: tuple[FileLayout, ...]
    payloads: Mapping[str, Sequence[Payload]]
    stats: RankSaveStats
    """The costs known before any byte is copied."""
    contents: ShareContents = field(default_factory=ShareContents)

    def transformed(self, transforms: Sequence[str]) -> SaveShare:
        """Return the same share with each item transformed, as in `("stream.zstd/1",)`."""
        if not transforms:
            return self
        packed = [pack_file(layout, self.payloads[layout.name], transforms) for layout in self.layouts]
        return replace(
            self,
            layouts=tuple(layout for layout, _ in packed),
            payloads={layout.name: payloads for layout, payloads in packed},
        )


def choose_pipeline_settings(
    layouts: Sequence[FileLayout], writers: int, buffer_bytes: int
) -> PipelineSettings:
    """Return settings to write these files with no more buffers than necessary, at most `buffer_bytes`."""
    streams = max(1, min(writers, len(layouts)))
    largest = max((layout.size_bytes for layout in layouts), default=0)
    # Equal chunks, so that none is small; several, so that the storage works while others are filled.
    num_chunks = max(-(-largest // MOST_CHUNK_BYTES), 2 if largest < FEW_CHUNKS_BYTES else 4)
    wanted = round_up(max(-(-largest // num_chunks), 1), PAGE_BYTES)
    room = buffer_bytes // (MIN_BUFFERS_PER_STREAM * streams) // PAGE_BYTES * PAGE_BYTES
    chunk_bytes = max(min(wanted, room), PAGE_BYTES)
    needed = sum(round_up(layout.size_bytes, chunk_bytes) for layout in layouts)
    least = MIN_BUFFERS_PER_STREAM * streams * chunk_bytes
    return PipelineSettings(
        streams=streams,
        chunk_bytes=chunk_bytes,
        buffer_memory_bytes=max(min(needed, buffer_bytes // chunk_bytes * chunk_bytes), least),
    )


def copy_to_host(
    payloads: Sequence[Payload], sizes: Sequence[int], memory: WarmMemory, device_streams: DeviceStreams
) -> list[memoryview]:
    """Copy payloads, whose sizes are in bytes, to `memory`, and return when all are copied.

    Each payload begins at a new page. Devices copy to pinned memory in side streams.
    """
    if device_streams:
        pin_memory(memory)
    views, start = [], 0
    for payload, size in zip(payloads, sizes, strict=True):
        views.append(memory.view[start : start + size])
        if size:
            payload.copy_into(0, views[-1], device_streams.get(payload.device))
        start += round_up(size, PAGE_BYTES)
    for stream in device_streams.values():
        stream.catch_up()
    return views


CopyOrder = Literal["with the writes", "at once", "before all else"]
"""When tensors are copied.

"before all else" needs memory for the whole share. No checksum is computed and nothing is written until
everything is copied, because training waits for the copies alone, and checksums and a busy disk would take
memory bandwidth from them. "with the writes" leaves processor and memory alone until `write_to` has opened
the files, so that a disk waits for the first buffer rather than for the last. See
docs/decisions/010-copy-or-write-first.md.
"""


class StagedFiles:
    """A `StagedSave` whose files are filled from payloads according to their layouts."""

    def __init__(
        self,
        share: SaveShare,
        memory: StagingMemory,
        settings: PipelineSettings,
        *,
        copies: CopyOrder,
        timeout_s: float,
    ) -> None:
        self._share = share
        self._copies = copies
        self._settings = settings
        self._lock = threading.Lock()
        self._is_claimed = False
        with ExitStack() as undo:
            borrowed = memory.borrow(settings.buffer_memory_bytes, timeout_s)
            undo.callback(memory.give_back, borrowed)
            self._start_ns = now_ns()
            # In the caller's thread, because device streams wait for what this thread's stream has queued so
            # far.
            device_streams = open_device_streams(chain.from_iterable(share.payloads.values()))
            if device_streams:
                pin_memory(borrowed)
            self._filler = LayoutFiller(
                share.layouts,
                share.payloads,
                device_streams=device_streams,
                sums_hot=copies != "before all else",
            )
            planned = [PlannedObject(layout.name, layout.size_bytes) for layout in share.layouts]
            self._pipe = undo.enter_context(
                WritePipeline(
                    planned,
                    self._filler,
                    settings,
                    memory=borrowed,
                    entered_ns=self._start_ns,
                    fills_first=copies == "before all else",
                )
            )
            if copies != "with the writes":
                self._pipe.start_filling()
            self._undo = undo.pop_all()

    def wait_staged(self, timeout_s: float | None = None) -> None:
        try:
            self._pipe.wait_filled(timeout_s)
        except PipelineStopped as error:
            raise SaveCancelled from error

    def count_bytes(self, storage: Storage, key_of: Callable[[str], str]) -> int:  # noqa: ARG002 - as laid out
        return sum(layout.size_bytes for layout in self._share.layouts)

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> WrittenShare:
        """Write all files durably; afterwards, the memory is free for the next save."""
        if self._claim():
            raise SaveCancelled
        with self._undo:
            try:
                if self._copies == "before all else":
                    self._pipe.wait_filled()
                measurement = self._pipe.write_to(
                    [storage], rank=self._share.stats.rank, progress=progress, key_of=key_of
                )
            except PipelineStopped as error:
                raise SaveCancelled from error
        files = []
        for layout in self._share.layouts:
            offset, size, payload = layout.columns()
            files.append(
                WrittenFile(
                    name=layout.name,
                    size_bytes=layout.size_bytes,
                    item_offset=offset,
                    item_bytes=size,
                    payload_offset=payload,
                    sums=self._filler.sums(layout.name),
                )
            )
        return WrittenShare(
            files=tuple(files),
            contents=self._share.contents,
            stats=replace(
                self._share.stats,
                file_bytes=measurement.ledger.durable_bytes,
                stage_s=max(self._pipe.filled_ns - self._start_ns, 0) / _NS_PER_S,
                write_s=(measurement.last_submit_ns - measurement.first_submit_ns) / _NS_PER_S,
                sync_s=(measurement.end_ns - measurement.last_submit_ns) / _NS_PER_S,
                memory_bytes=self._settings.buffer_memory_bytes,
            ),
        )

    def cancel(self) -> None:
        """Stop the copies and writes.

        If `write_to` is running, it gives the memory back; otherwise, this call does.
        """
        self._pipe.stop()
        if not self._claim():
            self._undo.close()

    def _claim(self) -> bool:
        """Claim the duty to give the memory back; return whether it had been claimed before."""
        with self._lock:
            was_claimed, self._is_claimed = self._is_claimed, True
        return was_claimed


def write_share(
    share: SaveShare,
    storage: Storage,
    key_of: Callable[[str], str],
    memory: StagingMemory,
    *,
    writers: int,
    transforms: Sequence[str],
) -> WrittenShare:
    """Transform and write one rank's files durably, through memory that no other save uses."""
    share = share.transformed(transforms)
    settings = choose_pipeline_settings(share.layouts, writers, memory.budget_bytes)
    staged = StagedFiles(share, memory, settings, copies="with the writes", timeout_s=TRANSFER_TIMEOUT_S)
    return staged.write_to(prefer_direct_access(storage), key_of)
