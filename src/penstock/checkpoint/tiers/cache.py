"""Node-local caches of all ranks as one level: written, made redundant, committed node by node, and rebuilt.

    save     drafts on all nodes -> ranks' files -> parity -> records -> manifest and metadata -> all nodes
    commit restore  what each node holds -> assessed -> what is lost is rebuilt into the caches it is missing
    from

Each node commits its own share by the protocol of any checkpoint; manifest, metadata and the records of its
groups lie on each. Invariant: a step counts as cached where assessing what all nodes committed says so, so a
save that died on some nodes is no step.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.checkpoint.commit.base import MANIFEST_NAME, METADATA_NAME, Committed, Draft, Seal
from penstock.checkpoint.commit.place import open_drafts, open_shelf
from penstock.checkpoint.loading.opening import DescribedStorage
from penstock.checkpoint.stored import Stored
from penstock.checkpoint.tiers.assess import Assessment, NodeHolding, assess
from penstock.checkpoint.tiers.groups import choose_groups
from penstock.checkpoint.tiers.holdings import GroupRecord, HeldFile, Member, read_record, record_bytes
from penstock.checkpoint.tiers.protecting import Protector
from penstock.checkpoint.tiers.ring import BLOCK_BYTES
from penstock.checkpoint.tiers.schemes import Partner, Scheme, check_schemes, scheme_for
from penstock.checkpoint.tiers.stripes import layout_for
from penstock.cluster.collect import collect
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.storage.owner import this_process
from penstock.storage.powers import find_folders, for_large_files
from penstock.storage.uri import parse_uri
from penstock.storage.whole import read_object, write_object

if TYPE_CHECKING:
    from penstock.checkpoint.staging.base import PreparedSave, RankShare, ShareStats, StagedSave
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.storage import Storage

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

RECORD_PREFIX = "redundancy-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """A step that was just saved to the caches: what it takes to save it elsewhere, too."""

    name: str
    save_id: str
    shares: tuple[RankShare, ...]
    seal: Seal
    """Of the whole step, all nodes together."""

    @property
    def stats(self) -> tuple[ShareStats, ...]:
        """What each rank spent."""
        return tuple(share.stats for share in self.shares)


class CacheLevel:
    """One rank's view of all caches. Everything but `holds` is collective.

    `domain` names what fails together with this rank; ranks of one domain never protect each other.
    """

    def __init__(
        self,
        storage: Storage,
        comm: Comm,
        *,
        schemes: Sequence[Scheme],
        domain: str | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        check_schemes(schemes)
        self.storage = storage
        self._comm = comm
        self._schemes = tuple(schemes)
        self._block_bytes = block_bytes
        told = self._together(
            lambda: (_node_of(storage, comm.rank), domain or comm.host), "all ranks to name their caches"
        )
        self._domains = tuple(each for _, each in told)
        self._leads = tuple([node for node, _ in told].index(node) for node, _ in told)
        """By rank: the lowest rank that uses the same cache."""
        self._groups = {
            scheme: choose_groups(
                self._domains, scheme.members, smallest=min(scheme.losses + 1, scheme.members)
            )
            for scheme in self._schemes
        }
        self._protector = Protector(storage, comm)
        self._drafts, self._shelf = open_drafts(storage), open_shelf(storage)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its node."""
        return self._lead == self._comm.rank

    @property
    def _lead(self) -> int:
        return self._leads[self._comm.rank]

    @property
    def _ranks_here(self) -> tuple[int, ...]:
        return tuple(rank for rank, lead in enumerate(self._leads) if lead == self._lead)

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each cache, in the order of their lowest ones."""
        return tuple(
            tuple(rank for rank, each in enumerate(self._leads) if each == lead)
            for lead in sorted(set(self._leads))
        )

    def save(
        self,
        name: str,
        prepared: PreparedSave,
        staged: StagedSave,
        *,
        number: int,
        facts: dict[str, Any],
        progress: Progress | None = None,
    ) -> Cached:
        """Write, protect and commit a step on all nodes. `number` counts checkpoints, from 1."""
        with ExitStack() as undo:
            undo.callback(staged.cancel)
            draft = self._start(name)
            undo.callback(self._drop, draft)
            shares = self._together(
                lambda: staged.write_to(for_large_files(self.storage), draft.key, progress),
                f"all ranks to write their files of {name}",
            )
            records = self._protect(name, draft, shares, scheme_for(number, self._schemes))
            seal = self._sealed(prepared, shares, {**facts, "save_id": draft.save_id})
            self._publish(draft, seal, records)
            undo.pop_all()
        return Cached(name=name, save_id=draft.save_id, shares=tuple(shares), seal=seal)

    def names(self) -> list[str]:
        """Every step that some node has committed, in no order."""
        told = self._together(
            lambda: self._shelf.names() if self.leads else [], "all nodes to list their caches"
        )
        return sorted({name for names in told for name in names})

    def names_here(self) -> list[str]:
        """Every step that this node has committed, in no order. Not collective."""
        return self._shelf.names()

    def assess(self, name: str, *, damaged: Collection[int] = ()) -> Assessment:
        """What the caches can give of a step, if the `damaged` ranks' files are as good as lost."""
        told = self._together(lambda: self._holding(name), f"all nodes to say what they hold of {name}")
        return assess([holding for holding in told if holding is not None], damaged=damaged)

    def holds(self, name: str) -> Stored:
        """The share of a step that this node has."""
        return Stored(self.storage, self._shelf.find(name))

    def view(self, name: str, found: Assessment) -> Stored:
        """A whole step as this rank can read it: its node's files, and all files through other ranks.

        Collective. What describes the step comes from one node that has it, as this one may have nothing.
        """
        has_it = bool(found.shares.get(self._lead))
        if self._comm.size == 1:
            return self.holds(name)
        teller = min(lead for lead, shares in found.shares.items() if shares)
        told = self._together(
            lambda: self._read_seal(name) if self._comm.rank == teller else None,
            f"rank {teller} to tell what {name} consists of",
        )[teller]
        assert told is not None, "a node that holds shares has their manifest"
        if not has_it:
            folder = Committed(name=name, folder=name)
            known = {folder.key(MANIFEST_NAME): told[0], folder.key(METADATA_NAME): told[1]}
            return Stored(DescribedStorage(self.storage, known), folder, readable=())
        held = self._shelf.find(name)
        start = f"{held.folder}/"
        here = tuple(info.key.removeprefix(start) for info in self.storage.list(held.folder))
        return Stored(self.storage, held, readable=here)

    def repair(self, name: str, found: Assessment) -> None:
        """Compute what is lost and commit it to the caches that it is missing from."""
        own = found.shares.get(self._lead, frozenset())
        gained = {rank for rank in found.lost if self._leads[found.actors[rank]] == self._lead}
        sealed = self._together(
            lambda: self._read_seal(name) if own and self.leads else None, f"the manifest of {name}"
        )
        manifest, metadata = next(each for each in sealed if each is not None)
        draft = self._start(name, only=[found.actors[rank] for rank in found.lost])
        with ExitStack() as undo:
            undo.callback(self._drop, draft)
            from_key = self._shelf.find(name).key if own else draft.key
            for record in found.records.values():
                self._protector.give_back(
                    record, found.lost, actors=found.actors, from_key=from_key, to_key=draft.key
                )
            self._together(lambda: None, f"all lost files of {name} to be rebuilt")
            if gained and self.leads:
                self._protector.bring_along(found.records, own, from_key=from_key, to_key=draft.key)
                seal = Seal(manifest=manifest, metadata=metadata, sizes={})
                self._publish_here(draft, seal, found.records, own | gained)
            undo.pop_all()
        self._together(lambda: None, f"all nodes to commit {name}")

    def remove(self, name: str) -> None:
        """Take a step out of all caches. Not collective: each node's lead removes its share."""
        if self.leads:
            try:
                self._shelf.remove(self._shelf.find(name))
            except ObjectNotFound:
                logger.debug("%s was not in the cache %s", name, self.storage.uri)

    def close(self) -> None:
        """Let go of the connections between ranks."""
        self._protector.close()

    def _start(self, name: str, only: Sequence[int] | None = None) -> Draft:
        """A draft of one save id on every node, or on the nodes of some ranks."""
        save_id = self._comm.broadcast(secrets.token_hex(8), awaiting="rank 0 to name the save")

        def start() -> Draft | None:
            if not self.leads or (
                only is not None and self._comm.rank not in {self._leads[each] for each in only}
            ):
                return None
            for swept in self._drafts.sweep():
                logger.info("Removed %s, which a save left that died, below %s", swept, self.storage.uri)
            return self._drafts.start(name, save_id)

        drafts = self._together(start, f"all nodes to make room for {name}")
        mine = drafts[self._lead]
        return mine or Draft(name=name, folder="", save_id=save_id)

    def _drop(self, draft: Draft) -> None:
        if self.leads and draft.folder:
            try:
                self._drafts.drop(draft)
            except StorageError as error:
                logger.warning("Could not remove the unfinished %s: %s", draft.folder, error)

    def _protect(
        self, name: str, draft: Draft, shares: Sequence[RankShare], scheme: Scheme
    ) -> dict[int, GroupRecord]:
        """Compute what members keep of each other; the records of all groups."""
        groups = self._groups[scheme]
        number = next(number for number, group in enumerate(groups) if self._comm.rank in group)
        plans = [self._planned(draft, group, shares, scheme) for group in groups]
        kept = self._together(
            lambda: self._protector.keep(plans[number], draft.key),
            f"all ranks to protect {name} by {scheme.name}",
        )
        return {
            each: plan.model_copy(update={"kept": tuple(file for rank in plan.ranks if (file := kept[rank]))})
            for each, plan in enumerate(plans)
        }

    def _planned(
        self, draft: Draft, group: tuple[int, ...], shares: Sequence[RankShare], scheme: Scheme
    ) -> GroupRecord:
        members = tuple(
            Member(
                rank=rank,
                domain=self._domains[rank],
                files=tuple(
                    HeldFile(name=file.name, size_bytes=file.size_bytes, sum="")
                    for file in shares[rank].files
                ),
            )
            for rank in group
        )
        largest = max(member.size_bytes for member in members)
        has_parity = scheme.losses and not isinstance(scheme, Partner)
        chunk = layout_for(len(group), scheme.losses, largest).chunk_bytes if has_parity else 0
        return GroupRecord(
            step=draft.name,
            save_id=draft.save_id,
            domains=self._domains,
            scheme=scheme.name,
            losses=scheme.losses,
            chunk_bytes=chunk,
            block_bytes=self._block_bytes,
            members=members,
            kept=(),
        )

    def _sealed(self, prepared: PreparedSave, shares: Sequence[RankShare], facts: dict[str, Any]) -> Seal:
        return self._comm.broadcast(
            self._together(
                lambda: prepared.seal(shares, facts) if self._comm.rank == 0 else None,
                "rank 0 to write the manifest",
            )[0],
            awaiting="the manifest",
        )

    def _publish(self, draft: Draft, seal: Seal, records: Mapping[int, GroupRecord]) -> None:
        """Commit on all nodes, or on none that stays: a node that cannot takes the step from all."""
        with ExitStack() as undo:
            undo.callback(self._forget, draft)
            self._together(
                lambda: self._publish_here(draft, seal, records, self._ranks_here) if self.leads else None,
                f"all nodes to commit {draft.name}",
            )
            undo.pop_all()

    def _publish_here(
        self, draft: Draft, seal: Seal, records: Mapping[int, GroupRecord], mine: Collection[int]
    ) -> None:
        """Commit exactly the shares of `mine`, ranks that saved, with the records of their groups."""
        sizes: dict[str, int] = {}
        for number, record in records.items():
            if set(record.ranks).isdisjoint(mine):
                continue
            written = write_object(self.storage, draft.key(_record_name(number)), [record_bytes(record)])
            sizes[_record_name(number)] = written.size_bytes
            for place, member in enumerate(record.members):
                if member.rank in mine:
                    sizes.update({file.name: file.size_bytes for file in member.files})
                    sizes.update({file.name: file.size_bytes for file in record.kept[place : place + 1]})
        self._drafts.publish(draft, Seal(manifest=seal.manifest, metadata=seal.metadata, sizes=sizes))

    def _forget(self, draft: Draft) -> None:
        """Remove what this node has committed of a step that others could not commit."""
        if not self.leads:
            return
        try:
            held = self._shelf.find(draft.name)
            manifest = bytes(read_object(self.storage, held.key(MANIFEST_NAME)))
            if draft.save_id.encode() in manifest:
                self._shelf.remove(held)
        except StorageError as error:
            logger.debug("Nothing to take back of %s: %s", draft.name, error)

    def _holding(self, name: str) -> NodeHolding | None:
        if not self.leads:
            return None
        ranks = self._ranks_here
        try:
            held = self._shelf.find(name)
            sizes = {
                info.key.removeprefix(f"{held.folder}/"): info.size_bytes
                for info in self.storage.list(held.folder)
            }
            records = self._records(held.folder, {f"{held.folder}/{name}" for name in sizes})
        except StorageError as error:
            logger.info("The cache %s has not got %s: %s", self.storage.uri, name, error)
            return NodeHolding(ranks=ranks)
        return NodeHolding(ranks=ranks, sizes=sizes, records=records)

    def _records(self, folder: str, keys: Iterable[str]) -> dict[int, GroupRecord]:
        """The records of groups that lie in a folder, by the group's number."""
        records = {}
        for key in keys:
            name = key.removeprefix(f"{folder}/")
            if name.startswith(RECORD_PREFIX):
                number = int(name.removeprefix(RECORD_PREFIX).removesuffix(".json"))
                records[number] = read_record(read_object(self.storage, key), f"{self.storage.uri}/{key}")
        return records

    def _read_seal(self, name: str) -> tuple[bytes, bytes] | None:
        try:
            held = self._shelf.find(name)
        except ObjectNotFound:
            return None
        return (
            bytes(read_object(self.storage, held.key(MANIFEST_NAME))),
            bytes(read_object(self.storage, held.key(METADATA_NAME))),
        )

    def _together(self, work: Callable[[], Result], awaiting: str) -> list[Result]:
        return collect(self._comm, work, awaiting=awaiting)


def _record_name(group: int) -> str:
    return f"{RECORD_PREFIX}{group}.json"


def _node_of(storage: Storage, rank: int) -> tuple[str, int, int]:
    """What tells caches apart: the running kernel, and the folder on it."""
    if find_folders(storage) is None:
        raise UsageError(
            "A cache is a folder of each node", where=storage.uri, fix="Give a path, such as /local/ssd/run."
        )
    root = parse_uri(storage.uri).root
    os.makedirs(root, exist_ok=True)  # noqa: PTH103 - the storage's own root, which may not be there yet
    facts = os.stat(root)  # noqa: PTH116 - likewise
    return this_process().kernel or f"rank {rank}", facts.st_dev, facts.st_ino
