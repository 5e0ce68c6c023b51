"""A load from an opened checkpoint into the tensors of a state, all ranks together.

The steps of a load, in order:

1. `formats.checkpoint_source` opens the checkpoint once for all ranks; `requests.locate_payloads` finds the
   payloads of items that other programs wrote.
2. `requests.build_requests` matches the state's leaves with the checkpoint's names; what no rank takes gets
   a place in the part that it belongs to (`stateful_parts`), or is an error.
3. `plan.load_plan` decides which rank reads what and sends it to whom.
4. `execute.execute_plan` reads (`reader`), exchanges (`transport`) and places (`placement`) the bytes, while
   a heartbeat ends the work on all ranks when one fails.
5. Compressed items and objects are unpacked, and objects are put into the state last.

Invariant: it returns on all ranks with everything loaded and verified, or raises on all of them. After an
error the values of tensors are undefined, and no object of the state has been replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.checkpoint.commit.catalog import AnyPath, CheckpointRef, absolute_path
from penstock.checkpoint.engine import LoadChoice, State
from penstock.checkpoint.formats.checkpoint_source import (
    CheckpointSource,
    open_checkpoint,
    open_together,
)
from penstock.checkpoint.formats.dcp_metadata import paused_garbage_collection
from penstock.checkpoint.loading import load_requests
from penstock.checkpoint.loading.execute import LoadContext, LoadTotals, execute_plan
from penstock.checkpoint.loading.host_links import HostLinks, connect_host
from penstock.checkpoint.loading.placement import Target, find_tied, item_targets, unpack, untie
from penstock.checkpoint.loading.stateful_parts import LoadedParts, loading_into
from penstock.checkpoint.plan import load_plan, region_arithmetic
from penstock.checkpoint.plan.agree import LoadWish, agree_on_load
from penstock.checkpoint.state.process_group import RankGroup
from penstock.checkpoint.state.regions import Ints, Regions, element_sizes
from penstock.checkpoint.state.tensors import LocalState, collect_for_load
from penstock.checkpoint.state.walk import Leaf, require_dict
from penstock.cluster.comm import Comm, decide_on_rank0, run_on_all_ranks
from penstock.errors import ObjectNotFound, UsageError, name_some
from penstock.progress import Progress, Silent
from penstock.storage import Storage
from penstock.storage.files.files_in_memory import MappedStorage
from penstock.storage.process_id import name_host
from penstock.storage.residency import are_resident
from penstock.transfer.reader import ReadBuffers, ReadSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load has done on this rank.

    `loaded` has the names that were filled; planning took `plan_s` seconds, moving bytes `move_s`.
    """

    loaded: tuple[str, ...]
    left: tuple[str, ...]
    """Parts of the state that were not changed: not chosen, or missing where that is allowed."""
    unused: tuple[str, ...]
    """What the checkpoint has and this rank did not request."""
    read_bytes: int
    """From storage, on this rank."""
    received_bytes: int
    """From other ranks."""
    num_verified: int
    """Items whose checksum this rank has verified."""
    plan_s: float
    move_s: float


class CheckpointLoader:
    """Loads states, one at a time. Its warm buffers are kept from load to load."""

    def __init__(
        self, settings: ReadSettings | None = None, options: load_plan.LoadOptions | None = None
    ) -> None:
        self._buffers = ReadBuffers(settings or ReadSettings())
        self._options = options or load_plan.LoadOptions()

    def load(
        self,
        state: State,
        stored: CheckpointRef,
        group: RankGroup,
        choice: LoadChoice,
        progress: Progress | None = None,
    ) -> LoadReport:
        """Fill `state` from a committed checkpoint. Collective."""
        folder, uri = stored.committed.folder, stored.uri
        opened = open_together(stored.storage, folder, uri, group.comm)
        return self.load_from(state, opened, group, choice, progress, readable=stored.readable)

    @paused_garbage_collection()
    def load_from(
        self,
        state: State,
        opened: CheckpointSource,
        group: RankGroup,
        choice: LoadChoice,
        progress: Progress | None = None,
        *,
        readable: Sequence[str] | None = None,
    ) -> LoadReport:
        """Fill `state` from a checkpoint that all ranks have opened. Collective.

        `readable` names the files that this rank can open, if not every rank can open all of them; it is
        given on all ranks or on none.
        """
        require_dict(state)
        source = opened
        if group.comm.rank == 0:
            source.tell_if_unchecked()
        num_saved = source.manifest.world_size if source.manifest else group.comm.size
        stored = load_requests.StoredNames(
            source.index,
            source.index.paths,
            source.key_types,
            group.comm.rank,
            partial(load_requests.asked_name, choice=choice),
            lacking=source.lacking.get(group.comm.rank, ()) if num_saved == group.comm.size else (),
        )
        prefixes = {key: load_requests.apply_rename(f"{key}.", choice.rename or {}) for key in state}
        with loading_into(state, stored, prefixes) as parts:
            if group.comm.rank == 0:
                parts.warn_of_other_ranks(num_saved, group.comm.size)
                if num_saved != group.comm.size and source.lacking:
                    parts.warn_of_all_entries(num_saved, set().union(*source.lacking.values()))
            return self._load(parts, opened, group, choice, progress=progress or Silent(), readable=readable)

    def close(self) -> None:
        """Free the buffers. May be called twice."""
        self._buffers = ReadBuffers(self._buffers.settings)

    def _load(
        self,
        parts: LoadedParts,
        opened: CheckpointSource,
        group: RankGroup,
        choice: LoadChoice,
        *,
        progress: Progress,
        readable: Sequence[str] | None,
    ) -> LoadReport:
        start_s, comm = time.perf_counter(), group.comm
        checkpoint = replace(opened, index=load_requests.locate_payloads(opened, comm))
        item_index = load_requests.index_byte_items(checkpoint.index)
        matched = _match_on_all_ranks(parts, checkpoint, item_index, choice, comm)
        is_cached = readable is None and _is_cached(checkpoint, item_index, matched.requests)
        plan, links, num_near = self._plan(
            checkpoint, item_index, matched.requests, comm, is_cached=is_cached, readable=readable
        )
        requests = matched.requests
        planned_s = time.perf_counter()
        targets = [*matched.targets, *item_targets(requests, item_index)]
        context = LoadContext(
            checkpoint=checkpoint,
            item_index=item_index,
            group=group,
            buffers=ReadBuffers(self._buffers.settings.for_cached(num_near)) if is_cached else self._buffers,
            progress=progress,
            storage=MappedStorage(checkpoint.storage)
            if is_cached
            else _storage_past_cache(checkpoint, item_index, plan),
            links=links,
        )
        with ExitStack() as closing_links:
            if links is not None:
                closing_links.callback(links.close)
            totals = execute_plan(plan, requests.regions, targets, context)
        values = run_on_all_ranks(
            comm,
            lambda: _finish(checkpoint, item_index, matched, targets, choice, parts=parts, rank=comm.rank),
            awaiting="all ranks to unpack what they have loaded",
        )
        # Objects are replaced last, when no rank can fail any more: a failed load replaces none of them.
        for leaf in matched.leaves:
            if leaf.name in values:
                leaf.put(values[leaf.name])
        matched.selection.warn_of_missing(comm.rank)
        parts.filled, parts.left = matched.selection.stored_names.keys(), matched.selection.left
        return _report(matched.selection, totals, planned_s - start_s, time.perf_counter() - planned_s)

    def _plan(
        self,
        checkpoint: CheckpointSource,
        item_index: load_requests.ByteItemIndex,
        requests: load_requests.LoadRequests,
        comm: Comm,
        *,
        is_cached: bool,
        readable: Sequence[str] | None,
    ) -> tuple[load_plan.LoadPlan, HostLinks | None, int]:
        """Plan what this rank does, and connect it to the ranks of its host if they share bytes. Collective.

        Also returns how many ranks this host has.
        """
        nothing = Regions.from_rows(())
        element_bytes, files = element_sizes(item_index.tensors), checkpoint.index.files
        own_files = set(files if readable is None else readable)

        def wish() -> LoadWish:
            # A rank that finds everything in its page cache takes it from there: each exchange costs more.
            return LoadWish(
                nothing if is_cached else requests.regions,
                None if readable is None else np.array([name in own_files for name in files], dtype=np.bool_),
                name_host() if comm.size > 1 else "",
            )

        shared = agree_on_load(comm, wish, item_index.stored, element_bytes, self._options)
        if isinstance(shared, load_plan.UnreadableFile):
            raise ObjectNotFound(
                f"None of the {comm.size} ranks can open {files[shared.file]}",
                uri=checkpoint.uri,
                fix="Restore the file on one of their nodes, or load another step.",
            ) from shared

        def plan_own(plan: load_plan.SharedLoadPlan, near: Ints | None) -> load_plan.LoadPlan:
            return load_plan.plan_rank_load(plan, element_bytes, comm.rank, self._options, near=near)

        links: HostLinks | None = None
        num_near = len(shared.near) or 1
        # Where all ranks find everything cached, nothing is left to share.
        if shared.part is not None:
            planned = plan_own(shared.part, shared.near) if shared.may_share_on_host else None
            links = None if planned is None else self._link(planned, element_bytes, shared.near, comm)
            if not is_cached:
                return planned if planned and links else plan_own(shared.part, None), links, num_near
        wanted = [requests.regions if rank == comm.rank else nothing for rank in range(comm.size)]
        plan = load_plan.plan_load(item_index.stored, element_bytes, wanted, self._options)
        return plan_own(plan, None), links, num_near

    def _link(
        self, plan: load_plan.LoadPlan, element_bytes: Ints, near: Ints, comm: Comm
    ) -> HostLinks | None:
        """Connect the ranks of this host, `near`, if they share bytes and can. Collective."""
        own = plan.regions.take(slice(plan.num_own))
        return connect_host(
            comm,
            near.tolist() or [comm.rank],
            settings=self._buffers.settings,
            read_bytes=int(own.num_bytes(element_bytes).sum()),
            is_needed=plan.shares_on_host,
        )


def open_path_on_all_ranks(path: AnyPath, comm: Comm) -> CheckpointSource:
    """Open a checkpoint at any path or URI, of any format. Collective."""
    return run_on_all_ranks(
        comm,
        lambda: open_checkpoint(path, rank=comm.rank),
        awaiting="all ranks to open the checkpoint",
        same=absolute_path(path),
    )


def _is_cached(
    checkpoint: CheckpointSource,
    item_index: load_requests.ByteItemIndex,
    requests: load_requests.LoadRequests,
) -> bool:
    """Whether this machine's page cache has all files in which this rank wants something."""
    stored = item_index.stored
    wanted = np.isin(stored.regions.tensor, requests.regions.tensor)
    files = region_arithmetic.distinct(stored.file[wanted]).tolist()
    return are_resident(checkpoint.storage, [checkpoint.key(checkpoint.index.files[file]) for file in files])


def _storage_past_cache(
    checkpoint: CheckpointSource, item_index: load_requests.ByteItemIndex, plan: load_plan.LoadPlan
) -> Storage:
    """The best access to the files that this rank reads; not every rank can open the same ones."""
    rows = plan.row[: plan.num_own]
    file = int(item_index.stored.file[rows[0]]) if len(rows) else 0
    return checkpoint.storage_of_files(file)


def _match_on_all_ranks(
    parts: LoadedParts,
    checkpoint: CheckpointSource,
    item_index: load_requests.ByteItemIndex,
    choice: LoadChoice,
    comm: Comm,
) -> _MatchedState:
    """Match, and ensure that some rank takes each name of the parts that were asked for. Collective."""

    def match() -> _MatchedState:
        with checkpoint.naming_misfits():
            parts.require_fit()
            return _match_state(parts.state, checkpoint, item_index, choice, comm.rank)

    awaiting = "all ranks to match their state with the checkpoint"
    matched = run_on_all_ranks(comm, match, awaiting=awaiting)
    stored, adopted = parts.stored, parts.places.adopted
    patterns = load_requests.patterns_of(choice)
    own_names = [*(leaf.name for leaf in matched.leaves), *parts.own_names()] if patterns else []
    is_met = np.array([pattern.matches(own_names, stored.names) for pattern in patterns], dtype=np.bool_)
    untaken = parts.untaken(matched.selection.unused)
    # Nearly always all ranks take everything, and nothing else has to be compared.
    if all(comm.gather(not (untaken or adopted) and bool(is_met.all()), awaiting=awaiting)):
        return matched

    # A rank's own value is of no use to the others.
    names = np.array([name for name in stored.names if not stored.is_of_one_rank(name)], dtype=np.object_)
    taken = set(matched.selection.stored_names.values()) - adopted
    required = {name for name in untaken if parts.is_whole(name)}
    marks = [np.isin(names, list(some)) for some in (taken, adopted, untaken, required)]
    packed = decide_on_rank0(
        comm,
        lambda: np.packbits(np.concatenate([is_met, *marks])),
        lambda of_ranks: np.bitwise_or.reduce(np.stack(of_ranks)),
        awaiting=awaiting,
    )
    anywhere = np.unpackbits(packed, count=len(is_met) + 4 * len(names)).astype(np.bool_)
    load_requests.require_met(patterns, anywhere[: len(is_met)].tolist(), stored.names, comm.rank)
    is_taken, is_adopted, is_untaken, is_required = anywhere[len(is_met) :].reshape(4, len(names))
    is_lost = is_untaken & ~is_taken & ~is_adopted
    if choice.strict and (is_lost & is_required).any():
        raise load_requests.untaken_error(names[is_lost & is_required].tolist())
    if (lost := names[is_lost].tolist()) and comm.rank == 0:
        logger.warning("Not loaded, as no part of the state takes it: %s", name_some(lost, 10))
    if not (is_taken & is_adopted).any():
        return matched
    parts.places.leave_empty(names[is_taken & is_adopted].tolist())
    return run_on_all_ranks(comm, match, awaiting=awaiting)


@dataclass(frozen=True, slots=True, eq=False)
class _MatchedState:
    """The leaves of this rank's state, what of the checkpoint goes to them, and the memory of its regions."""

    leaves: Sequence[Leaf]
    selection: load_requests.LeafSelection
    requests: load_requests.LoadRequests
    targets: Sequence[Target]
    tied: Sequence[tuple[int, int]] = ()
    """Rows of targets that are one memory in the state: the second is loaded beside it, to be compared."""


def _match_state(
    state: State,
    checkpoint: CheckpointSource,
    item_index: load_requests.ByteItemIndex,
    choice: LoadChoice,
    rank: int,
) -> _MatchedState:
    local_state, index = collect_for_load(state), checkpoint.index
    stored_names = [facts.name for facts in index.tensors] + [stored.name for stored in index.objects]
    selection = load_requests.select_leaves(
        [leaf.name for leaf in local_state.leaves],
        dict.fromkeys(stored_names),
        choice,
        rank=rank,
        paths=index.paths,
    )
    requests = load_requests.build_requests(
        local_state,
        selection,
        index,
        item_index,
        converts=choice.convert_dtypes,
        where=checkpoint.uri,
    )
    load_requests.require_lengths(checkpoint, item_index, requests.items)
    targets = [_target(local_state, requests, item_index, row) for row in range(len(requests.names))]
    tied = [pair for pair in find_tied(targets) if not _is_stored_alike(checkpoint, requests, *pair)]
    for _, row in tied:
        memory = torch.empty_like(targets[row].memory, memory_format=torch.contiguous_format)
        targets[row] = replace(targets[row], memory=memory)
    return _MatchedState(local_state.leaves, selection, requests, targets, tied)


def _is_stored_alike(
    checkpoint: CheckpointSource, requests: load_requests.LoadRequests, first: int, second: int
) -> bool:
    """Whether the checkpoint's own checksums say that two regions have the same elements."""
    wanted = requests.regions
    places = [wanted.offsets[row].tolist() + wanted.sizes[row].tolist() for row in (first, second)]
    if checkpoint.index.sums is None or places[0] != places[1]:
        return False
    stored, contents = checkpoint.index.stored.regions, []
    for number in wanted.tensor[[first, second]].tolist():
        rows = np.flatnonzero(stored.tensor == number)
        columns = (stored.offsets[rows], stored.sizes[rows], checkpoint.index.sums[rows])
        contents.append(sorted(np.concatenate(columns, axis=1).tolist()))
    return bool(contents[0]) and contents[0] == contents[1]


def _finish(
    checkpoint: CheckpointSource,
    item_index: load_requests.ByteItemIndex,
    matched: _MatchedState,
    targets: Sequence[Target],
    choice: LoadChoice,
    *,
    parts: LoadedParts,
    rank: int,
) -> dict[str, Any]:
    """What leaves get in place of what they have, when all bytes are there and known to be of one save."""
    if rank == 0:
        # Not all bytes can be verified: those of a region that nobody wants whole have no checksum.
        checkpoint.require_unmixed()
    values = unpack(checkpoint, item_index, matched.requests, targets, trust=choice.trust)
    copied = {leaf.name for leaf in matched.leaves if parts.gets_copies(leaf)} if matched.tied else set()
    names = [name for name, _ in matched.requests.names]
    untied, split = untie(targets, names, matched.tied, copied)
    for one, other in split:
        told = f"{one!r} and {other!r} are one tensor in the state, and two different ones in the checkpoint"
        if choice.strict:
            fix = "Untie them before the load, or skip one with exclude=."
            raise UsageError(told, where=checkpoint.uri, fix=fix)
        logger.warning("%s: it has the values of %r", told, one)
    return values | untied


def _target(
    local_state: LocalState,
    requests: load_requests.LoadRequests,
    item_index: load_requests.ByteItemIndex,
    row: int,
) -> Target:
    name, number = requests.names[row]
    shard = local_state.shards[name][number]
    return Target(shard.offsets, shard.memory, item_index.tensors[int(requests.regions.tensor[row])])


def _report(
    selection: load_requests.LeafSelection, totals: LoadTotals, plan_s: float, move_s: float
) -> LoadReport:
    report = LoadReport(
        loaded=tuple(selection.stored_names),
        left=selection.left,
        unused=selection.unused,
        read_bytes=totals.read_bytes,
        received_bytes=totals.received_bytes,
        num_verified=totals.num_verified,
        plan_s=plan_s,
        move_s=move_s,
    )
    logger.info("Loaded %d leaves: %s", len(report.loaded), report)
    return report
