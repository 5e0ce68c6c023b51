"""A load of several ranks: what fails on one of them is raised on all."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.checkpoint.api import save
from penstock.checkpoint.engine import LoadChoice
from penstock.checkpoint.formats.checkpoint_source import open_checkpoint
from penstock.checkpoint.loader import CheckpointLoader
from penstock.errors import RankFailed


class Part:
    """A part of a state that cannot say what it takes."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("the iterator is gone")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError(state_dict)


def test_a_part_that_cannot_list_its_state_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    save({"n": 3}, tmp_path / "step")
    opened = open_checkpoint(tmp_path / "step")

    def program(comm: ThreadComm) -> str:
        state = {"n": 0, "data": Part()} if comm.rank == 1 else {"n": 0}
        with pytest.raises(RankFailed, match=r"(?s)Rank 1 .*the iterator is gone") as caught:
            CheckpointLoader().load_from(state, opened, comm, LoadChoice())
        assert state["n"] == 0
        return str(caught.value)

    assert len(set(on_ranks(2, program))) == 1
