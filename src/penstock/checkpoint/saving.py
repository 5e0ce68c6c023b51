"""A state becomes a save that is ready to be staged: all ranks agree, each lays out its files.

Between `plan`, which decides, and `staging`, which copies and writes. Invariant: an error on any rank, such
as an object that cannot be packed, is raised on all of them before anything is written.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch

from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.dcp.metadata import DcpMetadata
from penstock.checkpoint.dcp.metadata_text import metadata_bytes
from penstock.checkpoint.dcp.pickled import without_collections
from penstock.checkpoint.dcp.transforms import require_known
from penstock.checkpoint.image import lay_out
from penstock.checkpoint.manifest import manifest_bytes, manifest_of
from penstock.checkpoint.patterns import matches
from penstock.checkpoint.pieces import Boxes, Contents, StoredBoxes, StoredObject
from penstock.checkpoint.plan.agreement import Planner
from penstock.checkpoint.plan.records import SaveOptions
from penstock.checkpoint.staging.memory import StagingMemory
from penstock.checkpoint.staging.packing import pack_file
from penstock.checkpoint.staging.payloads import payload_of_bytes, payload_of_tensor
from penstock.checkpoint.staging.staged import Share, Staged, pipe_settings
from penstock.checkpoint.state import leaves_of
from penstock.checkpoint.stateful import opened
from penstock.checkpoint.tensors import held_of_leaves, is_tensor, mesh_of
from penstock.cluster.collectives import run_on_all_ranks
from penstock.errors import UsageError
from penstock.storage.aligned import round_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.checkpoint.engine import Names, SaveChoice, State
    from penstock.checkpoint.manifest import Fact
    from penstock.checkpoint.members import Members
    from penstock.checkpoint.pieces import TensorFacts
    from penstock.checkpoint.plan.agreement import AgreedSave
    from penstock.checkpoint.plan.records import Bucket, SavePlan
    from penstock.checkpoint.staging.base import RankShare, Urgency
    from penstock.checkpoint.staging.payloads import Payload
    from penstock.checkpoint.state import Leaf
    from penstock.checkpoint.tensors import Holding
    from penstock.cluster.comm import Comm

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
    holding = held_of_leaves(_chosen(leaves_of(opened(state), is_tensor), choice.only), pack_objects=True)
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
