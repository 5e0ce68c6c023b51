"""Ranks that write, and what rank 0 makes of what they tell it meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.support.file_faults import CallLog, faulty_calls
from tests.support.known_steps import files_below
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.checkpoint.commit import checkpoints
from penstock.checkpoint.commit.checkpoints import (
    begin_save,
    stage_on_all_ranks,
    write_and_commit,
    write_into,
)
from penstock.checkpoint.engine import SaveChoice
from penstock.checkpoint.saver import Saver
from penstock.errors import RankFailed
from penstock.storage.uri import open_here
from penstock.testing.faults import FailAtCall, Verb

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from penstock.checkpoint.commit.protocol import Seal
    from penstock.checkpoint.engine import WrittenShare
    from penstock.storage import Storage


def _save(comm: ThreadComm, storage: Storage, on_seal: Callable[[], object] = lambda: None) -> None:
    saver = Saver()
    inside = saver.prepare({f"w{comm.rank}": torch.ones(3000)}, comm, SaveChoice())

    class Prepared:
        stage = inside.stage

        def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
            on_seal()
            return inside.seal(shares, facts)

    staged = inside.stage("commit")
    write_into(begin_save(storage, "x", comm), Prepared(), staged, comm, facts={"step": 1})
    saver.close()


def test_a_save_of_the_same_state_is_seven_calls_of_all_ranks(tmp_path: Path) -> None:
    def work(comm: ThreadComm) -> int:
        saver = Saver()
        for name in "abc":
            before = comm._call
            prepared = saver.prepare({f"w{comm.rank}": torch.ones(3000)}, comm, SaveChoice())
            staged = stage_on_all_ranks(prepared, "commit", comm)
            write_and_commit(prepared, staged, open_here(str(tmp_path)), name, comm)
        saver.close()
        return comm._call - before

    # Digests to rank 0 and its answer; all copy; all begin and get a draft; all have written and are told.
    assert on_ranks(3, work) == [7, 7, 7]


@pytest.mark.parametrize("mount", ["one", "several", "unknown"])
def test_a_rank_syncs_names_that_rank_0_may_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str
) -> None:
    calls = CallLog()
    storage = files_below(tmp_path, faulty_calls(calls))
    mounts = iter({"one": "11", "several": "12", "unknown": ["", ""]}[mount])
    monkeypatch.setattr(checkpoints, "name_mount", lambda _: next(mounts))

    def work(comm: ThreadComm) -> int:
        place = begin_save(storage, "x", comm)
        before = calls.names.count("fsync")
        comm.barrier(awaiting="both")
        place.sync_own_names()
        comm.barrier(awaiting="both")
        num_synced = calls.names.count("fsync") - before
        comm.barrier(awaiting="both")
        place.abandon()
        return num_synced

    assert on_ranks(2, work) == ([0, 0] if mount == "one" else [1, 1])


@pytest.mark.parametrize("verb", ["create", "finish"])
def test_a_rank_that_fails_before_or_after_its_files_are_there_fails_all(tmp_path: Path, verb: Verb) -> None:
    def work(comm: ThreadComm) -> str:
        storage = open_here(str(tmp_path))
        with pytest.raises(RankFailed, match="Injected fault") as caught:
            _save(comm, FailAtCall(storage, verb, 1) if comm.rank else storage)
        return str(caught.value)

    assert len(set(on_ranks(2, work))) == 1
    assert list(tmp_path.iterdir()) == []
