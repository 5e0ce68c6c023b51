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
from penstock.checkpoint.formats.dcp_metadata import DcpMetadata, metadata_bytes
from penstock.checkpoint.formats.manifest import manifest_bytes, manifest_of
from penstock.checkpoint.formats.objects import require_known
from penstock.checkpoint.formats.restricted_pickle import without_collections
from penstock.checkpoint.plan.save_plan import SaveOptions, place_objects, rank_plans, share_saving
from penstock.checkpoint.saving.file_layout import lay_out, pack_file
from penstock.checkpoint.saving.payloads import payload_of_bytes, payload_of_tensor
from penstock.checkpoint.saving.staging import Share, Staged, StagingMemory, pipe_settings
from penstock.checkpoint.state.leaves import expand_stateful, leaves_of, matches
from penstock.checkpoint.state.regions import Boxes, Contents, StoredBoxes, StoredObject
from penstock.checkpoint.state.tensors import held_of_leaves, is_tensor, mesh_of
from penstock.cluster.comm import run_on_all_ranks
from penstock.errors import UsageError
from penstock.storage.aligned import round_up

if TYPE_CHECKING:
    from penstock.checkpoint.engine import Names, RankShare, SaveChoice, State, Urgency
    from penstock.checkpoint.formats.manifest import Fact
    from penstock.checkpoint.plan.save_plan import (
        Bucket,
        Held,
        HeldObject,
        PlacedObject,
        SavePlan,
        SharedSavePlan,
    )
    from penstock.checkpoint.saving.payloads import Payload
    from penstock.checkpoint.state.leaves import Leaf
    from penstock.checkpoint.state.process_group import Members
    from penstock.checkpoint.state.regions import TensorFacts
    from penstock.checkpoint.state.tensors import Holding
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
        return rank_plans(self.shared, self.objects, self.options, only=rank)[0]

    def plans(self) -> list[SavePlan]:
        """What each rank writes, in rank order: for rank 0, which describes the whole checkpoint."""
        return rank_plans(self.shared, self.objects, self.options)


@dataclass(frozen=True, slots=True)
class _Outline:
    """What each rank always sends: digests, and its objects, which change from step to step."""

    tensors: bytes
    held: bytes
    objects: tuple[HeldObject, ...]
    known: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """What each rank sends where a plan is to be made. Of equal lists of tensors only the first travels."""

    tensors: tuple[TensorFacts, ...] | None
    boxes: Boxes


class Planner:
    """Plans saves of one communicator's ranks, and remembers the last few plans."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._plans: OrderedDict[bytes, SharedSavePlan] = OrderedDict()
        self.num_planned = 0
        """How often a plan had to be made; for figures and tests."""

    def agree(self, held: Held, options: SaveOptions) -> AgreedSave:
        """Collective: the plan for what all ranks hold. Raises the same on all ranks."""
        table = _digest_tensors(held.tensors)
        mine = _Outline(table, _digest_boxes(table, held.boxes, options), held.objects, tuple(self._plans))
        outlines = self._comm.gather(mine, awaiting="all ranks to say what they hold")
        objects = tuple(tuple(each) for each in place_objects([each.objects for each in outlines]))
        key = xxhash.xxh3_128_digest(b"".join(each.held for each in outlines))
        if all(key in each.known for each in outlines):
            self._plans.move_to_end(key)
            return AgreedSave(shared=self._plans[key], objects=objects, options=options)
        shared = share_saving(self._exchange(held, outlines), options)
        self.num_planned += 1
        self._plans[key] = shared
        while len(self._plans) > NUM_KEPT_PLANS:
            self._plans.popitem(last=False)
        return AgreedSave(shared=shared, objects=objects, options=options)

    def _exchange(self, held: Held, outlines: Sequence[_Outline]) -> list[Held]:
        first = {each.tensors: rank for rank, each in reversed(list(enumerate(outlines)))}
        speaks = first[outlines[self._comm.rank].tensors] == self._comm.rank
        whole = _Whole(held.tensors if speaks else None, held.boxes)
        wholes = self._comm.gather(whole, awaiting="all ranks to say what they hold, piece by piece")
        found = []
        for outline, each in zip(outlines, wholes, strict=True):
            tensors = wholes[first[outline.tensors]].tensors
            assert tensors is not None, "the first rank with a list of tensors sends it"
            found.append(replace(held, tensors=tensors, boxes=each.boxes, objects=()))
        return found


def _digest_tensors(tensors: Sequence[TensorFacts]) -> bytes:
    lines = (f"{each.name}\0{each.dtype}\0{each.shape}\0{each.item_bytes}\0" for each in tensors)
    return xxhash.xxh3_128_digest("".join(lines).encode())


def _digest_boxes(table: bytes, boxes: Boxes, options: SaveOptions) -> bytes:
    digest = xxhash.xxh3_128(table)
    digest.update(repr(options).encode())
    for column in (boxes.tensor, boxes.offsets, boxes.sizes):
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
        require_known(transforms)
        self._transforms = tuple(transforms)
        self._options = options or SaveOptions()
        self._memory = StagingMemory(staging_bytes)
        self._planners: WeakKeyDictionary[Comm, Planner] = WeakKeyDictionary()

    def prepare(self, state: State, members: Members, choice: SaveChoice) -> Prepared:
        """Let all ranks agree who writes what of `state`. Collective."""
        began_s = time.perf_counter()
        comm = members.comm
        holding = run_on_all_ranks(comm, lambda: _held(state, choice), awaiting=AWAITED)
        planner = self._planners.setdefault(comm, Planner(comm))
        agreed = planner.agree(holding.held, self._options)
        share = run_on_all_ranks(
            comm, lambda: self._share(agreed, comm.rank, holding, choice), awaiting=AWAITED
        )
        return Prepared(
            agreed,
            replace(share, plan_s=time.perf_counter() - began_s),
            self._memory,
            num_ranks=comm.size,
            mesh=mesh_of(holding.leaves),
            writers=self._options.writers,
            transforms=self._transforms,
            timeout_s=comm.timeout_s,
        )

    def _share(self, agreed: AgreedSave, rank: int, holding: Holding, choice: SaveChoice) -> Share:
        plan = agreed.plan_of(rank)
        images = [lay_out(bucket, plan.tensors) for bucket in plan.buckets]
        payloads = [_payloads(bucket, plan, holding, choice.dtype) for bucket in plan.buckets]
        if self._transforms:
            packed = [
                pack_file(image, of_file, self._transforms)
                for image, of_file in zip(images, payloads, strict=True)
            ]
            images, payloads = [image for image, _ in packed], [of_file for _, of_file in packed]
        return Share(
            rank=rank,
            images=tuple(images),
            payloads={image.name: of_file for image, of_file in zip(images, payloads, strict=True)},
            payload_bytes=plan.num_bytes,
            paths=_own_paths(agreed, plan, holding),
        )

    def close(self) -> None:
        """Let go of idle memory. Safe twice."""
        self._memory.clear()


class Prepared:
    """A `PreparedSave` of tensors in this process."""

    def __init__(
        self,
        agreed: AgreedSave,
        share: Share,
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

    def stage(self, urgent: Urgency = "copy") -> Staged:
        """Begin to copy this rank's share."""
        budget_bytes = self._memory.budget_bytes
        if urgent == "commit":
            budget_bytes = min(budget_bytes, WAITING_BUFFER_BYTES)
        settings = pipe_settings(self._share.images, self._writers, budget_bytes)
        needed_bytes = sum(round_up(image.size_bytes, settings.chunk_bytes) for image in self._share.images)
        return Staged(
            self._share,
            self._memory,
            settings,
            copies_first=urgent == "copy" and needed_bytes <= settings.buffer_memory_bytes,
            timeout_s=self._timeout_s,
        )

    def seal(self, shares: Sequence[RankShare], facts: Mapping[str, object]) -> Seal:
        """On rank 0: metadata and manifest of what all ranks have written."""
        # A million items make millions of short-lived objects, and collecting among them doubles the time.
        with without_collections():
            return self._seal(shares, facts)

    def _seal(self, shares: Sequence[RankShare], facts: Mapping[str, object]) -> Seal:
        contents = contents_of(self._agreed.plans(), shares, packed=bool(self._transforms))
        paths = {name: path for share in shares for name, path in share.paths.items()}
        named = {key: cast("Fact", value) for key, value in facts.items() if key not in ("step", "save_id")}
        save_id, step = str(facts.get("save_id", "")), facts.get("step")
        described = DcpMetadata(contents=contents, paths=paths, save_id=save_id)
        if self._transforms:
            described = replace(
                described,
                transforms=((), self._transforms),
                row_transform=np.ones(len(contents.stored), dtype=np.int64),
                object_transforms={each.name: self._transforms for each in contents.objects},
            )
        metadata = metadata_bytes(described)
        manifest = manifest_of(
            contents,
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


def contents_of(plans: Sequence[SavePlan], shares: Sequence[RankShare], *, packed: bool) -> Contents:
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
    boxes = Boxes.concatenated([bucket.boxes for bucket, _ in pairs])
    rows = [(file, slice(len(bucket.objects), None)) for bucket, file in pairs]
    nothing = np.zeros(0, dtype=np.int64)
    stored = StoredBoxes(
        boxes,
        file=np.repeat(np.arange(len(pairs)), [len(bucket.boxes) for bucket, _ in pairs]),
        item_offset=np.concatenate([nothing, *(file.item_offset[own] for file, own in rows)]),
        item_bytes=np.concatenate([nothing, *(file.item_bytes[own] for file, own in rows)]),
        payload_offset=np.concatenate([nothing, *(file.payload_offset[own] for file, own in rows)]),
        packed=np.full(len(boxes), packed),
    )
    tensors = plans[0].tensors if plans else ()
    return Contents(tensors, stored, tuple(objects), tuple(file.name for _, file in pairs))


def _held(state: State, choice: SaveChoice) -> Holding:
    """What this rank holds of what is to be saved, with the dtypes that it is to be saved as."""
    holding = held_of_leaves(
        _chosen(leaves_of(expand_stateful(state), is_tensor), choice.only), pack_objects=True
    )
    if choice.dtype is None:
        return holding
    tensors = tuple(_as_dtype(facts, choice.dtype) for facts in holding.held.tensors)
    return replace(holding, held=replace(holding.held, tensors=tensors))


def _chosen(leaves: Sequence[Leaf], only: Names | None) -> Sequence[Leaf]:
    if only is None:
        return leaves
    chosen = [leaf for leaf in leaves if matches(leaf.name, only)]
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


def _payloads(bucket: Bucket, plan: SavePlan, holding: Holding, dtype: torch.dtype | None) -> list[Payload]:
    payloads = [payload_of_bytes(holding.objects[placed.name]) for placed in bucket.objects]
    for row, number in enumerate(bucket.boxes.tensor.tolist()):
        facts = plan.tensors[number]
        view = holding.view(facts.name, *bucket.boxes.box(row, len(facts.shape)))
        payloads.append(payload_of_tensor(view, dtype if view.is_floating_point() else None))
    return payloads


def _own_paths(agreed: AgreedSave, plan: SavePlan, holding: Holding) -> dict[str, tuple[str | int, ...]]:
    """The places of what this rank is the first to write: together, ranks tell each once."""
    paths = {leaf.name: leaf.path for leaf in holding.leaves}
    shared = agreed.shared
    numbers, first = np.unique(shared.boxes.tensor, return_index=True)
    mine = numbers[shared.rank[first] == plan.rank].tolist()
    own = {plan.tensors[number].name: paths[plan.tensors[number].name] for number in mine}
    for bucket in plan.buckets:
        for placed in bucket.objects:
            # An object of one rank alone has a name of its own and would displace the common one.
            is_common = placed.stored_name == placed.name
            own[placed.stored_name] = paths[placed.name] if is_common else (placed.stored_name,)
    return own
