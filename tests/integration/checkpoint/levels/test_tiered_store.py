"""Where a step is looked for when the caches cannot give it: ranks that are threads, with real files."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.bytes_engine import BytesEngine
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.checkpoint.commit.catalog import StepCatalog
from penstock.checkpoint.engine import LoadChoice, SaveChoice
from penstock.checkpoint.levels.cache import CacheLevel
from penstock.checkpoint.levels.options import Single, Xor
from penstock.checkpoint.levels.tiered_store import TieredStore
from penstock.checkpoint.manager.step_store import DurableStore, StepCopy
from penstock.checkpoint.state.process_group import RankGroup
from penstock.errors import PenstockError
from penstock.progress import Silent
from penstock.storage import open_storage
from penstock.testing.faults import FailAtCall

RANKS = 4


def content(rank: int) -> bytearray:
    return bytearray([rank + 1]) * 30_000


def keeper_of(comm: ThreadComm, folder: Path, *, broken: int | None = None, **choices: Any) -> TieredStore:
    """`broken` is the rank whose cache takes no file any more."""
    storage = open_storage(str(folder / f"host-{comm.rank}"), {})
    if comm.rank == broken:
        storage = FailAtCall(storage, "create", 3)
    plain = DurableStore(
        StepCatalog(open_storage(str(folder / "durable"), {})), comm, keep=None, timeout_s=30.0
    )
    level = CacheLevel(storage, comm, schemes=[choices.pop("scheme", Xor(group=RANKS))])
    return TieredStore(level, plain, None, flush=None, keep_cached=choices.pop("keep_cached", 2))


def save(comm: ThreadComm, keeper: TieredStore, name: str) -> str:
    prepared = BytesEngine().prepare({"bytes": content(comm.rank)}, RankGroup(comm), SaveChoice())
    uri, _ = keeper.open(name).complete(prepared, prepared.stage(), Silent())
    return uri


def looked(comm: ThreadComm, keeper: TieredStore, step: int) -> list[str]:
    """What the keeper finds, each copy loaded and compared."""
    told = []
    for found in keeper.copies(step):
        if isinstance(found, StepCopy):
            state = {"bytes": bytearray(30_000)}
            try:
                BytesEngine().load(state, found.open(), RankGroup(comm), LoadChoice(), None)
            except PenstockError as error:
                told.append(f"{found.level}: {type(error).__name__}")
            else:
                assert state["bytes"] == content(comm.rank)
                return [*told, found.level]
        else:
            told.append(found.reason)
    return told


def test_a_rebuild_that_fails_leads_to_the_durable_level(tmp_path: Path) -> None:
    def save_both(comm: ThreadComm) -> None:
        keeper = keeper_of(comm, tmp_path)
        save(comm, keeper, "step-1")
        plain = DurableStore(
            StepCatalog(open_storage(str(tmp_path / "durable"), {})), comm, keep=None, timeout_s=30.0
        )
        prepared = BytesEngine().prepare({"bytes": content(comm.rank)}, RankGroup(comm), SaveChoice())
        plain.open("step-1").complete(prepared, prepared.stage(), Silent())

    on_ranks(RANKS, save_both)
    shutil.rmtree(tmp_path / "host-2")
    for told in on_ranks(RANKS, lambda comm: looked(comm, keeper_of(comm, tmp_path, broken=2), 1)):
        assert "could not be rebuilt: Rank 2 on thread-2 failed" in told[0]
        assert told[1:] == ["durable"]
    assert not list((tmp_path / "host-2").glob("*step-1*/*")), "nothing half rebuilt stays"
    # The disk works again, and the same step comes from the caches.
    for told in on_ranks(RANKS, lambda comm: looked(comm, keeper_of(comm, tmp_path), 1)):
        assert told == ["cache"]


def test_a_step_without_any_copy_is_an_error(tmp_path: Path) -> None:
    assert (
        on_ranks(2, lambda comm: looked(comm, keeper_of(comm, tmp_path, scheme=Single()), 3))
        == [["no level has it"]] * 2
    )


@pytest.mark.parametrize("keep_cached", [1, None])
def test_old_steps_leave_the_caches(keep_cached: int | None, tmp_path: Path) -> None:
    def save_two(comm: ThreadComm) -> list[int]:
        keeper = keeper_of(comm, tmp_path, keep_cached=keep_cached)
        uris = [save(comm, keeper, name) for name in ("step-1", "step-2")]
        assert all(f"host-{comm.rank}" in uri for uri in uris)
        return keeper.steps()

    assert on_ranks(RANKS, save_two) == [[2] if keep_cached else [1, 2]] * RANKS


def test_an_abandoned_slot_leaves_nothing_in_any_cache(tmp_path: Path) -> None:
    def give_up(comm: ThreadComm) -> None:
        keeper = keeper_of(comm, tmp_path)
        slot = keeper.open("step-1")
        slot.path("rank.bin").write_bytes(b"half")
        comm.barrier(awaiting="all ranks to have written half")
        slot.abandon()
        slot.abandon()
        keeper.close()

    on_ranks(RANKS, give_up)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
