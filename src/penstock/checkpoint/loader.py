"""A load from a checkpoint into the tensors of a state, by all ranks together.

The steps of a load, in order:

1. Open: rank 0 reads the checkpoint's description for all ranks.
2. Match: each rank decides which name of the checkpoint goes to which leaf of its state (`match`), and which
   bytes it needs. The ranks check that no name that a part should take is left over.
3. Plan: `plan.load_plan` decides which rank reads what, and to which ranks it sends it.
4. Transfer: threads read blocks (`transfer.reader`) and put them in place (`place`). At the same time, ranks
   of one host copy from each other's memory (`host_windows`), and ranks of different hosts exchange messages
   (`place`). If one rank fails, a heartbeat ends the work on all of them.
5. Unpack: compressed items and objects are unpacked, and each rank checks that its parts can take them.
6. Take: parts with `load_state_dict` load their state; objects are put into the plain state last.

Invariants: a load returns on all ranks with everything loaded and verified, or raises on all of them. After
an error, the values of tensors are undefined, and no object of the state has been replaced, unless a part's
own `load_state_dict` has raised: then other parts that have one may have changed. A rank whose reads fail
still sends and receives everything, so that no other rank waits for it forever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from penstock.checkpoint.commit.checkpoints import AnyPath, CheckpointRef, absolute_path, require_step
from penstock.checkpoint.engine import LoadChoice, State
from penstock.checkpoint.formats.checkpoint_source import (
    CheckpointSource,
    locate_payloads,
    open_checkpoint,
    open_together,
)
from penstock.checkpoint.formats.description import checksum_of, paused_garbage_collection
from penstock.checkpoint.host_windows import HostLinks, HostSharing, connect_host, settings_for_sharing
from penstock.checkpoint.match import (
    LeafSelection,
    LoadedParts,
    StoredNames,
    find_idle,
    find_wanted,
    loading_into,
    require_matches,
    select_leaves,
)
from penstock.checkpoint.place import (
    Destinations,
    Incoming,
    Outbox,
    Target,
    find_tied,
    incoming_messages,
    item_targets,
    outgoing_messages,
    run_rounds,
    unpack,
    untie,
    wait_for_devices,
)
from penstock.checkpoint.plan.load_plan import (
    ByteItemIndex,
    LoadOptions,
    LoadPlan,
    LoadRequests,
    SharedLoadPlan,
    UnreadableFile,
    agree_on_load,
    index_byte_items,
    payload_starts,
    plan_load,
    plan_rank_load,
    request_items,
    require_covered,
)
from penstock.checkpoint.state.regions import ByteArray, Ints, Regions, find_overlaps
from penstock.checkpoint.state.tensors import collect_for_load
from penstock.checkpoint.state.walk import Leaf, require_dict
from penstock.cluster.comm import Comm, decide_on_rank0, format_cause, run_on_all_ranks
from penstock.errors import (
    DataDamaged,
    ObjectNotFound,
    PenstockError,
    RankError,
    RankFailed,
    UsageError,
    WaitTimeout,
    name_some,
)
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.aligned import PAGE_BYTES
from penstock.storage.capabilities import find_local_paths, no_thread, submit_or_run
from penstock.storage.process_id import name_host
from penstock.storage.protocol import Source
from penstock.storage.residency import MappedStorage, are_resident
from penstock.transfer.buffers import pin_memory
from penstock.transfer.reader import (
    BlockReader,
    ChecksummedItem,
    ReadBuffers,
    ReadSettings,
    Span,
    plan_blocks,
)

logger = logging.getLogger(__name__)

NUM_VERIFYING_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The result of a load on this rank.

    `loaded` has the names that were filled; planning took `plan_s` seconds, transferring bytes `move_s`
    seconds.
    """

    loaded: tuple[str, ...]
    left: tuple[str, ...]
    """Parts of the state that were left unchanged: not selected, or missing from the checkpoint where that is
    allowed.
    """
    unused: tuple[str, ...]
    """Names in the checkpoint that this rank did not request."""
    read_bytes: int
    """Bytes that this rank read from storage."""
    received_bytes: int
    """Bytes that this rank received from other ranks."""
    num_verified: int
    """The number of items whose checksum this rank has verified."""
    plan_s: float
    move_s: float


class CheckpointLoader:
    """Loads states, one at a time. Its buffers are kept from load to load."""

    def __init__(self, settings: ReadSettings | None = None, options: LoadOptions | None = None) -> None:
        self._buffers = ReadBuffers(settings or ReadSettings())
        self._options = options or LoadOptions()

    def close(self) -> None:
        """Free the buffers. May be called twice."""
        self._buffers = ReadBuffers(self._buffers.settings)

    def load(
        self,
        state: State,
        stored: CheckpointRef,
        comm: Comm,
        choice: LoadChoice,
        progress: Progress | None = None,
    ) -> LoadReport:
        """Fill `state` from a committed checkpoint. Collective."""
        opened = open_together(stored.storage, stored.committed.folder, stored.uri, comm)
        require_step(opened.manifest, stored.step, stored.uri)
        return self.load_from(state, opened, comm, choice, progress, readable=stored.readable)

    @paused_garbage_collection()
    def load_from(
        self,
        state: State,
        opened: CheckpointSource,
        comm: Comm,
        choice: LoadChoice,
        progress: Progress | None = None,
        *,
        readable: Sequence[str] | None = None,
    ) -> LoadReport:
        """Fill `state` from a checkpoint that all ranks have opened. Collective.

        If not every rank can open all files, `readable` names those that this rank can open; it is given
        either on all ranks or on none.
        """
        start_s = time.perf_counter()
        require_dict(state)
        if comm.rank == 0:
            opened.tell_if_unchecked()
        num_saved = opened.manifest.world_size if opened.manifest else comm.size
        stored = StoredNames(
            opened.index,
            choice,
            # Ranks that did not save have no values of their own: what looks like one is a program's key.
            rank=comm.rank if comm.rank < num_saved else 0,
            key_types=opened.key_types,
            entries=opened.entries,
            # Which entries a rank lacked is meaningful only if as many ranks load as have saved.
            are_as_many=num_saved == comm.size,
            read=opened.value,
        )
        with ExitStack() as loading:

            def begin() -> LoadedParts:
                with opened.naming_misfits():
                    parts = loading.enter_context(loading_into(state, stored))
                    if num_saved != comm.size:
                        parts.require_as_many_ranks(num_saved, comm.size)
                return parts

            parts = run_on_all_ranks(comm, begin, awaiting="all ranks to list what their state takes")
            if comm.rank == 0:
                parts.warn_of_other_ranks(num_saved, comm.size)
            checkpoint = locate_payloads(opened, comm)
            items = index_byte_items(checkpoint.index)
            matched = _match_on_all_ranks(parts, checkpoint, items, choice, comm)
            selection, requests = matched.selection, matched.requests
            parts.filled, parts.left = selection.stored_names.keys(), selection.left
            targets = [*matched.targets, *item_targets(requests, items.tensors)]
            planned_s, *moved = self.fetch(
                checkpoint, items, requests, targets, comm, progress=progress, readable=readable
            )

            def unpack_all() -> dict[str, Any]:
                if comm.rank == 0:
                    # Not all bytes can be verified: a region that no rank needs as a whole has no checksum.
                    checkpoint.require_unmixed()
                values = _unpack(checkpoint, matched, targets, choice)
                for leaf in matched.leaves:
                    if leaf.name in values and parts.holds_copy(leaf):
                        leaf.put(values.pop(leaf.name))
                    elif leaf.name in values:
                        leaf.require_place()
                parts.check()
                return values

            values = run_on_all_ranks(comm, unpack_all, awaiting="all ranks to unpack what they have loaded")
            # From here on, only a `load_state_dict` of the program or of torch can fail.
            run_on_all_ranks(comm, parts.take, awaiting="all ranks to load the state of their parts")
            for leaf in matched.leaves:
                if leaf.name in values:
                    leaf.put(values[leaf.name])
            if selection.missing and comm.rank == 0:
                # Ranks hardly differ in this, so only one reports it.
                missing = name_some(selection.missing, 10)
                logger.warning("Missing from the checkpoint, left unchanged: %s", missing)
        report = LoadReport(
            loaded=tuple(selection.stored_names),
            left=selection.left,
            unused=selection.unused,
            read_bytes=moved[0],
            received_bytes=moved[1],
            num_verified=moved[2],
            plan_s=planned_s - start_s,
            move_s=time.perf_counter() - planned_s,
        )
        logger.info("Loaded %d leaves: %s", len(report.loaded), report)
        return report

    def fetch(
        self,
        checkpoint: CheckpointSource,
        items: ByteItemIndex,
        requests: LoadRequests,
        targets: Sequence[Target],
        comm: Comm,
        *,
        progress: Progress | None = None,
        readable: Sequence[str] | None = None,
    ) -> tuple[float, int, int, int]:
        """Plan which rank reads what; then read, exchange, place and verify this rank's part. Collective.

        `targets` are the memory of the requested regions, row by row. Returns the time when planning ended,
        the bytes read and received, and the number of items verified; raises on all ranks if any of them
        fails.
        """
        # A rank that finds everything in its page cache takes it from there: every exchange costs more.
        wanted = np.isin(items.stored.regions.tensor, requests.regions.tensor)
        files = [checkpoint.index.files[number] for number in np.unique(items.stored.file[wanted])]
        is_cached = readable is None and are_resident(checkpoint.storage, [*map(checkpoint.key, files)])
        plan, links, num_near = self._plan(checkpoint, items, requests, comm, readable, is_cached=is_cached)
        planned_s = time.perf_counter()

        # Not every rank can open the same files, so the best access is determined for a file that this rank
        # reads.
        rows = plan.row[: plan.num_own]
        file = int(items.stored.file[rows[0]]) if len(rows) else 0
        buffers, storage = self._buffers, checkpoint.storage_of_files(file)
        if is_cached:
            buffers = ReadBuffers(buffers.settings.for_cached(num_near))
            storage = MappedStorage(checkpoint.storage)
        context = LoadContext(
            checkpoint=checkpoint,
            items=items,
            comm=comm,
            buffers=buffers,
            progress=progress or Progress(),
            storage=storage,
            links=links,
        )

        def work(cancelled: Future[None]) -> tuple[float, int, int, int]:
            with checkpoint.explaining_damage():
                read_bytes, received_bytes, num_verified = _move(plan, targets, context, cancelled)
                num_verified += _verify_cut_items(plan, requests.regions, targets, context)
            return planned_s, read_bytes, received_bytes, num_verified

        wait_for_devices(targets)
        with ExitStack() as closing_links:
            if links is not None:
                closing_links.callback(links.close)
            return run_with_heartbeat(comm, work, awaiting="all ranks to load their parts")

    def _plan(
        self,
        checkpoint: CheckpointSource,
        items: ByteItemIndex,
        requests: LoadRequests,
        comm: Comm,
        readable: Sequence[str] | None,
        *,
        is_cached: bool,
    ) -> tuple[LoadPlan, HostLinks | None, int]:
        """Plan this rank's part, and connect it to the ranks of its host if they share bytes. Collective.

        Also returns how many ranks this host has.
        """
        element_bytes, files = items.element_bytes, checkpoint.index.files
        nothing = Regions.from_rows(())
        can_open = None if readable is None else np.isin(np.array(files, dtype=np.object_), list(readable))
        wish = (nothing if is_cached else requests.regions, can_open, name_host() if comm.size > 1 else "")
        try:
            part, near, may_share_on_host = agree_on_load(
                comm, lambda: wish, items.stored, element_bytes, self._options
            )
        except UnreadableFile as error:
            raise ObjectNotFound(
                f"None of the {comm.size} ranks can open {files[error.file]}",
                uri=checkpoint.uri,
                fix="Restore the file on one of their nodes, or load another step.",
            ) from error

        def plan_with(part: SharedLoadPlan, near: Ints | None = None) -> LoadPlan:
            return plan_rank_load(part, element_bytes, comm.rank, self._options, near=near)

        plan, links, num_near = None, None, len(near) or 1
        if part is not None and may_share_on_host:
            plan = plan_with(part, near)
            shares_on_host = len(plan.shown_read) > 0 or plan.num_own < len(plan.row)
            if any(comm.gather(shares_on_host, awaiting="which ranks share bytes")):
                own_bytes = plan.regions.take(slice(plan.num_own)).num_bytes(element_bytes)
                host = near.tolist() or [comm.rank]
                settings = self._buffers.settings
                links = connect_host(comm, host, settings=settings, read_bytes=int(own_bytes.sum()))
        if is_cached or part is None:
            # This rank takes everything from its page cache, or no rank needs anything.
            alone = [requests.regions if rank == comm.rank else nothing for rank in range(comm.size)]
            return plan_with(plan_load(items.stored, element_bytes, alone, self._options)), links, num_near
        return plan if plan is not None and links is not None else plan_with(part), links, num_near


def open_path_on_all_ranks(path: AnyPath, comm: Comm) -> CheckpointSource:
    """Open a checkpoint of any format, given by path or URI. Collective."""
    return run_on_all_ranks(
        comm,
        lambda: open_checkpoint(path, rank=comm.rank),
        awaiting="all ranks to open the checkpoint",
        same=absolute_path(path),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _MatchedState:
    """The leaves of this rank's state, their names in the checkpoint, and the memory to fill."""

    leaves: Sequence[Leaf]
    selection: LeafSelection
    requests: LoadRequests
    names: Sequence[str]
    """For each target, the name of its leaf."""
    targets: Sequence[Target]
    tied: Sequence[tuple[int, int, torch.Tensor]]
    """Pairs of targets that share memory in the state, and the second's view of it: the second is loaded
    elsewhere, to be compared with that view.
    """
    copied: Container[str]
    """The names of leaves whose part copies what it loads, so that they may be in any memory."""


def _match_on_all_ranks(
    parts: LoadedParts,
    checkpoint: CheckpointSource,
    items: ByteItemIndex,
    choice: LoadChoice,
    comm: Comm,
) -> _MatchedState:
    """Match names, and check that some rank takes each that requested parts should take. Collective."""

    def match() -> _MatchedState:
        with checkpoint.naming_misfits():
            return _match(parts, checkpoint, items, choice)

    awaiting = "all ranks to match their state with the checkpoint"
    matched = run_on_all_ranks(comm, match, awaiting=awaiting)
    stored, adopted = parts.stored, parts.places.adopted
    own_names = [*(leaf.name for leaf in matched.leaves), *filter(None, map(parts.own_name, stored.names))]
    idle = find_idle(choice, own_names, stored.names)
    untaken = parts.untaken(matched.selection.unused)
    of_ranks = comm.gather((idle, bool(untaken or adopted)), awaiting=awaiting)
    require_matches(choice, [each for each, _ in of_ranks], stored.names, comm.rank)
    # Nearly always, all ranks take everything, and nothing else has to be compared.
    if not any(is_open for _, is_open in of_ranks):
        return matched

    # Pipeline stages take different names, so another rank may take what this one leaves.
    # Each rank has its own order of the names.
    names = np.array(
        sorted(name for name in stored.names if not stored.is_of_one_rank(name)), dtype=np.object_
    )
    taken = set(matched.selection.stored_names.values()) - adopted
    required = {name for name in untaken if parts.is_whole(name)}
    marks = [np.isin(names, list(some)) for some in (taken, adopted, untaken, required)]
    packed = decide_on_rank0(
        comm,
        lambda: np.packbits(np.stack(marks)),
        lambda of_ranks: np.bitwise_or.reduce(np.stack(of_ranks)),
        awaiting=awaiting,
    )
    anywhere = np.unpackbits(packed, count=4 * len(names)).astype(np.bool_)
    is_taken, is_adopted, is_untaken, is_required = anywhere.reshape(4, len(names))
    is_lost = is_untaken & ~is_taken & ~is_adopted
    if choice.strict and (is_lost & is_required).any():
        lost_names = list(map(repr, names[is_lost & is_required].tolist()))
        raise UsageError(
            f"The checkpoint holds {name_some(lost_names)}, which no part of the state takes",
            fix="Build the state as it was saved, and load an optimizer together with its model. Or skip this"
            " with exclude=, or leave it with a warning: strict=False.",
        )
    if (lost := names[is_lost].tolist()) and comm.rank == 0:
        logger.warning("Not loaded, as no part of the state takes it: %s", name_some(lost, 10))
    if not (is_taken & is_adopted).any():
        return matched
    parts.places.leave_empty(names[is_taken & is_adopted].tolist())
    return run_on_all_ranks(comm, match, awaiting=awaiting)


def _match(
    parts: LoadedParts, checkpoint: CheckpointSource, items: ByteItemIndex, choice: LoadChoice
) -> _MatchedState:
    local_state, index = collect_for_load(parts.state), checkpoint.index
    leaves = local_state.leaves
    object_names = [stored.name for stored in index.objects]
    selection = select_leaves(
        [leaf.name for leaf in leaves],
        dict.fromkeys([facts.name for facts in index.tensors] + object_names),
        choice,
        rank=parts.stored.rank,
        paths=index.paths,
    )
    regions, shards, objects = find_wanted(
        local_state, selection, index.tensors, object_names, converts=choice.convert_dtypes
    )
    requests = request_stored(checkpoint, items, regions, objects)
    targets = [
        Target(shard.offsets, shard.memory, items.tensors[number])
        for (_, shard), number in zip(shards, regions.tensor.tolist(), strict=True)
    ]
    names, copied = [name for name, _ in shards], {leaf.name for leaf in leaves if parts.gets_copies(leaf)}
    are_alike = partial(_are_stored_alike, checkpoint, requests)
    pairs = find_tied(targets, lambda row: names[row] in copied, are_alike)
    tied = [(first, row, targets[row].memory) for first, row in pairs]
    for _, row, shared in tied:
        memory = torch.empty_like(shared, memory_format=torch.contiguous_format)
        targets[row] = replace(targets[row], memory=memory)
    return _MatchedState(leaves, selection, requests, names, targets, tied, copied)


LARGE_BYTES = 256 << 20


def request_stored(
    checkpoint: CheckpointSource, items: ByteItemIndex, regions: Regions, objects: Mapping[str, int]
) -> LoadRequests:
    """Return the requests for these regions, and for these objects by leaf name.

    Raises `DataDamaged` if a region is not stored or a large item extends beyond its file, before memory is
    allocated for it.
    """
    require_covered(checkpoint.index, regions, checkpoint.uri)
    requests = request_items(regions, objects, checkpoint.index, items)
    for number in requests.items:
        facts = items.tensors[number]
        if facts.shape[0] < LARGE_BYTES:
            continue
        row = len(items.stored) - len(items.tensors) + number
        key = checkpoint.key(checkpoint.index.files[int(items.stored.file[row])])
        # A file that is only on another rank's node is read there, and its length is checked there.
        with suppress(ObjectNotFound):
            size_bytes = checkpoint.storage.stat(key).size_bytes
            end = int(items.stored.item_offset[row]) + facts.shape[0]
            if end > size_bytes:
                raise DataDamaged(
                    f"{facts.name!r} should end at byte {end} of a file that has {size_bytes}",
                    where=f"{checkpoint.uri}, {key}",
                    fix="Load an older checkpoint.",
                )
    return requests


def _are_stored_alike(checkpoint: CheckpointSource, requests: LoadRequests, first: int, second: int) -> bool:
    """Return True if two regions are one, or are the same parts of tensors with equal checksums."""
    wanted = requests.regions
    places = [wanted.offsets[row].tolist() + wanted.sizes[row].tolist() for row in (first, second)]
    if places[0] != places[1] or checkpoint.index.sums is None:
        return places[0] == places[1] and bool(wanted.tensor[first] == wanted.tensor[second])
    stored, contents = checkpoint.index.stored.regions, []
    for number in wanted.tensor[[first, second]].tolist():
        rows = np.flatnonzero(stored.tensor == number)
        columns = (stored.offsets[rows], stored.sizes[rows], checkpoint.index.sums[rows])
        contents.append(sorted(np.concatenate(columns, axis=1).tolist()))
    return bool(contents[0]) and contents[0] == contents[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadContext:
    """The context in which a plan is executed."""

    checkpoint: CheckpointSource
    items: ByteItemIndex
    comm: Comm
    buffers: ReadBuffers
    progress: Progress
    storage: Storage
    """The storage of the checkpoint, or faster access to the same files."""
    links: HostLinks | None = None
    """Links to the ranks of this host whose reads this rank sees by plan; None if it sees none."""

    def open_file(self, number: int) -> Source:
        """Open one of the checkpoint's files, by number."""
        return self.storage.open(self.checkpoint.key(self.checkpoint.index.files[number]))

    def checksummed_items(self, rows: Ints) -> dict[int, ChecksummedItem]:
        """Return the items of these rows of `items` with their checksums; empty if these are not known."""
        index = self.checkpoint.index
        if index.sums is None:
            return {}
        stored = self.items.stored
        found = {}
        for row in rows.tolist():
            source, begin = int(self.items.source_row[row]), int(stored.item_offset[row])
            found[row] = ChecksummedItem(
                self.items.tensors[int(stored.regions.tensor[row])].name,
                f"{self.checkpoint.uri}/{index.files[int(stored.file[row])]}",
                begin,
                begin + int(stored.item_bytes[row]),
                index.objects[-1 - source].sum if source < 0 else index.sums[source].tobytes(),
            )
        return found


def _move(
    plan: LoadPlan, targets: Sequence[Target], context: LoadContext, cancelled: Future[None]
) -> tuple[int, int, int]:
    """Read, exchange and place this rank's bytes. After a cancellation, nothing more is read.

    Messages that other ranks wait for are then sent with arbitrary content, so that those ranks end as well.
    """
    timeout_s, tensors, stored = context.comm.timeout_s, context.items.tensors, context.items.stored
    # The beginning and end of each read's payload in its file.
    starts = payload_starts(plan.regions, stored.regions.take(plan.row))
    begin = stored.payload_offset[plan.row] + starts * context.items.element_bytes[plan.regions.tensor]
    end = begin + plan.regions.num_bytes(context.items.element_bytes)

    messages, message_places = outgoing_messages(plan.sends, tensors)
    outbox = Outbox(messages, timeout_s)
    paths = find_local_paths(context.storage)
    destinations = Destinations(
        plan,
        begin.tolist(),
        targets,
        tensors=tensors,
        outbox=outbox,
        messages=message_places,
        # Direct I/O needs aligned memory, and is slower into small pages than into the reader's huge ones.
        takes_any_address=paths is None or paths.uses_page_cache,
    )
    incoming = incoming_messages(plan.receives, tensors, targets)
    is_for_cuda = any(target.memory.device.type == "cuda" for target in targets)
    with _exchanging(outbox, incoming, context) as exchange:
        whole_items = _find_whole_items(plan, begin, end, context)
        spans = _plan_spans(plan, stored.file[plan.row], begin, end, whole_items)
        own_spans = spans[: plan.num_own]
        settings = context.buffers.settings
        if context.links is not None:
            settings = settings_for_sharing(context.links, settings)
        if paths is not None:
            # Object storage gets few, large requests, whatever the size of the load.
            settings = settings.fit(sum(span.end - span.begin for span in own_spans))
        blocks = plan_blocks(
            own_spans,
            block_bytes=settings.block_bytes,
            alignment_bytes=PAGE_BYTES,
            tapered_for=settings.streams if paths is not None else 0,
        )
        sharing = None
        if context.links is not None:
            # Devices copy from pinned memory; the reader's buffers are pinned, but the window is not.
            sharing = HostSharing(
                context.links,
                plan,
                spans,
                destinations,
                timeout_s=timeout_s,
                reads_into_window=not is_for_cuda,
            )
        reader = BlockReader(
            blocks,
            spans,
            open_file=context.open_file,
            sink=destinations,
            items=whole_items,
            progress=context.progress,
            wait_for_room=outbox.wait_for_room,
            viewers=sharing,
        )
        num_read = sum(block.end - block.begin for block in blocks)
        context.progress.begin("loading", num_read)
        num_links = len(context.links.links) if context.links is not None else 0
        with (
            ThreadPoolExecutor(settings.streams, thread_name_prefix="penstock-load") as readers,
            ThreadPoolExecutor(num_links or 1, thread_name_prefix="penstock-share") as listeners,
            ExitStack() as undo,
        ):
            stops = [reader.stop, outbox.give_up] + ([sharing.stop] if sharing is not None else [])
            for stop in stops:
                undo.callback(stop)
            pin = pin_memory if is_for_cuda else None
            reading = reader.start(context.buffers, readers, pin, streams=settings.streams)
            viewing = sharing.start(listeners) if sharing is not None else []
            futures = [*exchange, *reading, *viewing]

            def stop_all() -> None:
                for stop in stops:
                    stop()

            cancelled.add_done_callback(lambda _: stop_all())
            for future in futures:
                future.add_done_callback(lambda done: stop_all() if done.exception() is not None else None)
            wait(futures)
    reader.close()
    for future in futures:
        future.result()
    received_bytes = sum(message.size_bytes for message in incoming)
    received_bytes += sharing.seen_bytes if sharing is not None else 0
    return num_read, received_bytes, len(whole_items)


@contextmanager
def _exchanging(
    outbox: Outbox, incoming: Sequence[Incoming], context: LoadContext
) -> Iterator[list[Future[None]]]:
    """Send and receive while other threads read.

    Messages are sent even if reading never begins: other ranks wait for them.
    """
    if not (outbox.messages or incoming):
        yield []
        return
    comm = context.comm
    run = partial(run_rounds, comm.transfer(), outbox, incoming, comm.timeout_s)
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-exchange") as threads, ExitStack() as undo:
        undo.callback(outbox.give_up)
        try:
            exchange = threads.submit(run)
        except RuntimeError as error:
            outbox.give_up()
            run()
            raise no_thread(error) from error
        yield [exchange]


def _find_whole_items(
    plan: LoadPlan, begin: Ints, end: Ints, context: LoadContext
) -> dict[int, ChecksummedItem]:
    """Return the items that this rank reads completely, and so verifies, by row of `ByteItemIndex`."""
    num_own, num_items = plan.num_own, len(context.items.stored)
    row, begin, end = plan.row[:num_own], begin[:num_own], end[:num_own]
    # The reads of one item are consecutive. They cover it if there is no gap between them and their sizes add
    # up to it.
    has_gap = (row[1:] == row[:-1]) & (begin[1:] != end[:-1])
    num_gaps = np.bincount(row[1:][has_gap], minlength=num_items)
    num_bytes = np.bincount(row, weights=end - begin, minlength=num_items)
    is_whole = num_bytes == context.items.stored.regions.num_bytes(context.items.element_bytes)
    return context.checksummed_items(np.unique(row[(is_whole & (num_gaps == 0))[row]]))


def _plan_spans(
    plan: LoadPlan, file: Ints, begin: Ints, end: Ints, whole_items: dict[int, ChecksummedItem]
) -> list[Span]:
    """Return the bytes that each read needs: its payload and, if the item is to be verified, its envelope."""
    spans = []
    rows = plan.row.tolist()
    neighbours = zip(rows, [-1, *rows][:-1], [*rows, -1][1:], strict=True)
    columns = zip(file.tolist(), begin.tolist(), end.tolist(), strict=True)
    for (row, before, after), (number, low, high) in zip(neighbours, columns, strict=True):
        item = whole_items.get(row)
        if item is None:
            spans.append(Span(number, low, high))
            continue
        first = item.begin if before != row else low
        spans.append(Span(number, first, item.end if after != row else high, row))
    return spans


def _verify_cut_items(
    plan: LoadPlan, wanted: Regions, targets: Sequence[Target], context: LoadContext
) -> int:
    """Verify items that several ranks have read in parts; return how many this rank verified.

    The rank that read the beginning of an item verifies it, if its memory now contains the whole item. Raises
    `DataDamaged`, naming the first damaged item.
    """
    stored = context.items.stored
    row, regions = plan.row[: plan.num_own], plan.regions.take(slice(plan.num_own))
    outer = stored.regions.take(row)
    own_bytes = np.zeros(len(stored), dtype=np.int64)
    np.add.at(own_bytes, row, regions.num_bytes(context.items.element_bytes))
    is_cut = own_bytes[row] < outer.num_bytes(context.items.element_bytes)
    cut_rows = np.unique(row[(payload_starts(regions, outer) == 0) & is_cut])

    loaded: list[tuple[int, ChecksummedItem, ByteArray]] = []
    for number, item in context.checksummed_items(cut_rows).items():
        region = stored.regions.take(np.array([number]))
        facts = context.items.tensors[int(region.tensor[0])]
        _, places, common = find_overlaps(region, wanted)
        for place in places[common.num_elements == region.num_elements].tolist():
            payload = targets[place].contiguous_bytes(*region.region(0, len(facts.shape)))
            if payload is not None:
                loaded.append((number, item, payload))
                break

    def verify(number: int, item: ChecksummedItem, payload: ByteArray) -> None:
        # The payload is in memory; the two parts of the envelope around it are read from the file.
        begin = int(stored.payload_offset[number])
        prefix, suffix = bytearray(begin - item.begin), bytearray(item.end - begin - payload.nbytes)
        with closing(context.open_file(int(stored.file[number]))) as source:
            source.read_into(item.begin, memoryview(prefix))
            source.read_into(begin + payload.nbytes, memoryview(suffix))
        item.require(checksum_of(prefix, payload.data, suffix))

    if loaded:
        with ThreadPoolExecutor(NUM_VERIFYING_THREADS) as threads:
            list(threads.map(verify, *zip(*loaded, strict=True)))
    return len(loaded)


def _unpack(
    checkpoint: CheckpointSource,
    matched: _MatchedState,
    targets: Sequence[Target],
    choice: LoadChoice,
) -> dict[str, Any]:
    """Return new values of leaves. Called when all bytes have arrived and are known to come from one save."""
    values = unpack(checkpoint, matched.requests, targets, trust=choice.trust)
    untied, split = untie(targets, matched.names, matched.tied, matched.copied)
    for one, other in split:
        finding = (
            f"{one!r} and {other!r} are one tensor in the state, and two different ones in the checkpoint"
        )
        if choice.strict:
            fix = "Untie them before the load, or skip one with exclude=."
            raise UsageError(finding, where=checkpoint.uri, fix=fix)
        logger.warning("%s: it has the values of %r", finding, one)
    return values | untied


Result = TypeVar("Result")
HEARTBEAT_S = 1.0
"""The longest time for which one rank's failure can stay unknown to another. Messages this rare are free."""
INTERRUPTED = "it was interrupted (Ctrl-C) while loading"


def run_with_heartbeat(
    comm: Comm, work: Callable[[Future[None]], Result], *, awaiting: str, limit_s: float | None = None
) -> Result:
    """Run `work` on all ranks and return its result here, or raise on all ranks if it fails on any.

    Collective. `work` runs in a thread. It receives a future, which is done once this load is cancelled;
    `work` must end soon after that. No other thread may use `comm` in the meantime. A rank that is done waits
    at most `limit_s` for the others (default: the limit of `comm`). On a single rank, the original error is
    raised.
    """
    limit_s = comm.timeout_s if limit_s is None else limit_s
    cancelled: Future[None] = Future()
    interrupted = threading.Event()

    def cancel() -> None:
        with suppress(InvalidStateError):
            cancelled.set_result(None)

    if comm.size == 1:
        with ExitStack() as undo:
            undo.callback(cancel)
            return work(cancelled)
    working: list[Future[Result]] = []

    def beat() -> list[tuple[str, str | None]]:
        """Start the work; return the host and the last status of each rank."""
        with ExitStack() as undo:
            undo.callback(cancel)
            try:
                working.append(workers.submit(work, cancelled))
            except RuntimeError as error:
                # Once cancelled, the work ends after sending what other ranks wait for.
                cancel()
                with suppress(PenstockError):
                    work(cancelled)
                failed: Future[Result] = Future()
                failed.set_exception(no_thread(error))
                working.append(failed)
            done_s: float | None = None
            while True:
                wait(working, timeout=HEARTBEAT_S)
                done_s = time.monotonic() if done_s is None and working[0].done() else done_s
                status: str | None = INTERRUPTED
                if not interrupted.is_set():
                    status = _status(working[0], done_s, awaiting, limit_s)
                statuses = comm.gather((comm.host, status), awaiting=awaiting)
                states = [state for _, state in statuses]
                if any(states) or None not in states:
                    return statuses

    with (
        ThreadPoolExecutor(1, thread_name_prefix="penstock-work") as workers,
        ThreadPoolExecutor(1, thread_name_prefix="penstock-heartbeat") as heartbeats,
        ExitStack() as undo,
    ):
        # An interrupt leaves this block as well: the heartbeat then informs the other ranks, and ends.
        undo.callback(cancel)
        undo.callback(interrupted.set)
        # The heartbeat's thread starts the work, so that an interrupt finds either both running or neither.
        beating = submit_or_run(heartbeats, beat)
        # With time limits, because Ctrl-C does not end a wait that begins just after it.
        while wait([beating], timeout=HEARTBEAT_S).not_done:
            pass
        undo.pop_all()
        cancel()
        try:
            statuses = beating.result()
        except RankError as error:
            # If ranks lost contact with each other, the work may know which of them died.
            cause = working[0].exception() if working else None
            if isinstance(cause, RankError):
                raise cause from error
            raise
        wait(working)
    for rank, (host, state) in enumerate(statuses):
        if state:
            raise RankFailed(rank, host, state) from (working[0].exception() if rank == comm.rank else None)
    return working[0].result()


def _status(working: Future[Any], done_s: float | None, awaiting: str, limit_s: float) -> str | None:
    """Return this rank's status: None while it is busy, "" once it is done, or the cause of its failure."""
    if done_s is None:
        return None
    if (error := working.exception()) is not None:
        return format_cause(error)
    return format_cause(WaitTimeout(awaiting, limit_s)) if time.monotonic() - done_s > limit_s else ""
