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
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.checkpoint.commit.catalog import Stored
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, Committed, Draft, Seal
from penstock.checkpoint.formats.checkpoint_source import DescribedStorage
from penstock.checkpoint.levels.node_cache import NodeCache, folders_of
from penstock.checkpoint.levels.options import Partner, Scheme, check_schemes, scheme_for
from penstock.checkpoint.levels.redundancy.parity_layout import choose_groups, layout_for
from penstock.checkpoint.levels.redundancy.recoverability import Assessment, assess
from penstock.checkpoint.levels.redundancy.redundancy_record import GroupRecord, HeldFile, Member
from penstock.checkpoint.levels.redundancy.ring import BLOCK_BYTES, KeyOf, Protector
from penstock.cluster.collectives import all_gather_results
from penstock.storage.capabilities import prefer_direct_access
from penstock.storage.process_id import current_process
from penstock.storage.uri import parse_uri

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from penstock.checkpoint.engine import PreparedSave, RankShare, ShareStats, StagedSave
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.storage import Storage

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


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
    """One rank's view of all caches. Collective, but for `holds`, `names_here`, `drop` and `remove`.

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
        self._lead = self._leads[comm.rank]
        self._groups = {
            scheme: choose_groups(
                self._domains, scheme.members, smallest=min(scheme.losses + 1, scheme.members)
            )
            for scheme in self._schemes
        }
        self._protector = Protector(storage, comm)
        self._node = NodeCache(storage, next(ranks for ranks in self.nodes if comm.rank in ranks))

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its node."""
        return self._lead == self._comm.rank

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
            draft = self.start(name)
            cached = self.complete(draft, prepared, staged, number=number, facts=facts, progress=progress)
            undo.pop_all()
        return cached

    def start(self, name: str, only: Collection[int] | None = None) -> Draft:
        """A draft of one save id on every node, or on the nodes of some ranks."""
        save_id = self._comm.broadcast(secrets.token_hex(8), awaiting="rank 0 to name the save")
        leads = set(self._leads if only is None else [self._leads[rank] for rank in only])
        drafts = self._together(
            lambda: self._node.start(name, save_id) if self.leads and self._lead in leads else None,
            f"all nodes to make room for {name}",
        )
        return drafts[self._lead] or Draft(name=name, folder="", save_id=save_id)

    def complete(
        self,
        draft: Draft,
        prepared: PreparedSave,
        staged: StagedSave,
        *,
        number: int,
        facts: dict[str, Any],
        progress: Progress | None = None,
    ) -> Cached:
        """Write into a draft on all nodes, protect it, and commit it; where that fails, the draft is gone."""
        with ExitStack() as undo:
            undo.callback(staged.cancel)
            undo.callback(self.drop, draft)
            shares = self._together(
                lambda: staged.write_to(prefer_direct_access(self.storage), draft.key, progress),
                f"all ranks to write their files of {draft.name}",
            )
            records = self._protect(draft, shares, scheme_for(number, self._schemes))
            seal = self._sealed(prepared, shares, {**facts, "save_id": draft.save_id})
            self._publish(draft, seal, records)
            undo.pop_all()
        return Cached(name=draft.name, save_id=draft.save_id, shares=tuple(shares), seal=seal)

    def drop(self, draft: Draft) -> None:
        """Remove a draft that is not to be completed: each node's lead its own."""
        if self.leads and draft.folder:
            self._node.drop(draft)

    def names(self) -> list[str]:
        """Every step that some node has committed, in no order.

        A step that a crash kept from being committed on all nodes is none, unless what is left is enough.
        """
        told = self._together(
            lambda: (self._node.names(), self._node.doubtful()) if self.leads else ([], set()),
            "all nodes to list their caches",
        )
        sure = {name for names, doubtful in told for name in names if name not in doubtful}
        for name in sorted({name for names, _ in told for name in names} - sure):
            found = self.assess(name)
            if found.reason:
                logger.warning("%s was never committed on all nodes, and goes: %s", name, found.reason)
                self.remove(name)
            else:
                sure.add(name)
            if self.leads:
                self._node.confirm(name)
        return sorted(sure)

    def names_here(self) -> list[str]:
        """Every step that this node has committed, in no order."""
        return self._node.names()

    def assess(self, name: str, *, damaged: Collection[int] = ()) -> Assessment:
        """What the caches can give of a step, if the `damaged` ranks' files are as good as lost."""
        told = self._together(
            lambda: self._node.holding(name) if self.leads else None,
            f"all nodes to say what they hold of {name}",
        )
        return assess([holding for holding in told if holding is not None], damaged=damaged)

    def holds(self, name: str) -> Stored:
        """The share of a step that this node has."""
        return self._node.held(name)

    def view(self, name: str, found: Assessment) -> Stored:
        """A whole step as this rank can read it: its node's files, and all files through other ranks.

        What describes the step comes from one node that has it, as this one may have nothing.
        """
        if self._comm.size == 1:
            return self.holds(name)
        manifest, metadata = self.told_seal(name, found)
        if found.shares.get(self._lead):
            held = self.holds(name)
            return replace(held, readable=tuple(self._node.files(held)))
        folder = Committed(name=name, folder=name)
        known = {folder.key(MANIFEST_NAME): manifest, folder.key(METADATA_NAME): metadata}
        return Stored(DescribedStorage(self.storage, known), folder, readable=())

    def repair(self, name: str, found: Assessment) -> None:
        """Compute what is lost and commit it to the caches that it is missing from."""
        self._refill(
            name,
            found,
            {rank: found.actors[rank] for rank in found.lost},
            lambda from_key, to_key: self._rebuild(found, from_key, to_key),
        )

    def bring_home(self, name: str, found: Assessment) -> Stored:
        """A whole step as this rank can read it, once each rank's share lies on the node of its home."""
        away = {
            rank: home
            for rank, home in found.homes.items()
            if rank not in found.shares.get(self._leads[home], ())
        }
        if away:
            self._refill(
                name,
                found,
                away,
                lambda from_key, to_key: self._protector.send_home(
                    found.records, away, actors=found.actors, from_key=from_key, to_key=to_key
                ),
            )
            found = self.assess(name)
        return self.view(name, found)

    def told_seal(self, name: str, found: Assessment) -> tuple[bytes, bytes]:
        """Manifest and metadata of a step, from the first node that has a share of it."""
        teller = min(lead for lead, shares in found.shares.items() if shares)
        told = self._together(
            lambda: self._node.seal(name) if self._comm.rank == teller else None,
            f"rank {teller} to tell what {name} consists of",
        )[teller]
        assert told is not None, "a node that holds shares has their manifest"
        return told

    def remove(self, name: str) -> None:
        """Take a step out of all caches: each node's lead removes its share."""
        if self.leads:
            self._node.remove(name)

    def close(self) -> None:
        """Let go of the connections between ranks."""
        self._protector.close()

    def _rebuild(self, found: Assessment, from_key: KeyOf, to_key: KeyOf) -> None:
        for record in found.records.values():
            self._protector.give_back(
                record, found.lost, actors=found.actors, from_key=from_key, to_key=to_key
            )

    def _refill(
        self, name: str, found: Assessment, gains: Mapping[int, int], fill: Callable[[KeyOf, KeyOf], None]
    ) -> None:
        """Give the nodes of some ranks shares that they have not got: `gains` by the rank that saved.

        `fill` writes them, from what lies on this node or comes from others. What a node has already stays.
        """
        own = found.shares.get(self._lead, frozenset())
        gained = {rank for rank, home in gains.items() if self._leads[home] == self._lead}
        manifest, metadata = self.told_seal(name, found)
        draft = self.start(name, only=gains.values())
        with ExitStack() as undo:
            undo.callback(self.drop, draft)
            from_key = self.holds(name).key if own else draft.key
            self._together(lambda: fill(from_key, draft.key), f"all missing files of {name} to be there")

            def commit() -> None:
                if gained and self.leads:
                    self._protector.bring_along(found.records, own, from_key=from_key, to_key=draft.key)
                    self._node.publish(draft, manifest, metadata, found.records, own | gained)

            self._together(commit, f"all nodes to commit {name}")
            undo.pop_all()

    def _protect(self, draft: Draft, shares: Sequence[RankShare], scheme: Scheme) -> dict[int, GroupRecord]:
        """Compute what members keep of each other; the records of all groups."""
        groups = self._groups[scheme]
        number = next(number for number, group in enumerate(groups) if self._comm.rank in group)
        plans = [
            _planned(draft, group, shares, scheme, domains=self._domains, block_bytes=self._block_bytes)
            for group in groups
        ]
        kept = self._together(
            lambda: self._protector.keep(plans[number], draft.key),
            f"all ranks to protect {draft.name} by {scheme.name}",
        )
        return {
            each: plan.model_copy(update={"kept": tuple(file for rank in plan.ranks if (file := kept[rank]))})
            for each, plan in enumerate(plans)
        }

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

        def publish() -> None:
            if self.leads:
                self._node.announce(draft)
                self._node.publish(draft, seal.manifest, seal.metadata, records, self._node.ranks)

        with ExitStack() as undo:
            if self.leads:
                undo.callback(self._node.take_back, draft)
            self._together(publish, f"all nodes to commit {draft.name}")
            undo.pop_all()
        if self.leads:
            self._node.confirm(draft.name)

    def _together(self, work: Callable[[], Result], awaiting: str) -> list[Result]:
        return all_gather_results(self._comm, work, awaiting=awaiting)


def _planned(
    draft: Draft,
    group: tuple[int, ...],
    shares: Sequence[RankShare],
    scheme: Scheme,
    *,
    domains: tuple[str, ...],
    block_bytes: int,
) -> GroupRecord:
    """The record of a group before it is known what its members keep of each other."""
    members = tuple(
        Member(
            rank=rank,
            domain=domains[rank],
            files=tuple(
                HeldFile(name=file.name, size_bytes=file.size_bytes, sum="") for file in shares[rank].files
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
        domains=domains,
        scheme=scheme.name,
        losses=scheme.losses,
        chunk_bytes=chunk,
        block_bytes=block_bytes,
        members=members,
        kept=(),
    )


def _node_of(storage: Storage, rank: int) -> tuple[str, int, int]:
    """What tells caches apart: the running kernel, and the folder on it."""
    folders_of(storage)
    root = parse_uri(storage.uri).root
    os.makedirs(root, exist_ok=True)  # noqa: PTH103 - the storage's own root, which may not be there yet
    facts = os.stat(root)  # noqa: PTH116 - likewise
    return current_process().kernel or f"rank {rank}", facts.st_dev, facts.st_ino
