"""Orders that nodes repair together: what one node cannot read fails on all of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.checkpoint.levels.cache import CacheLevel
from penstock.checkpoint.levels.flush.daemon_client import OrderRepair
from penstock.checkpoint.levels.flush.flush_folder import FlushFolder, JournalReader
from penstock.errors import RankFailed


@pytest.mark.parametrize("broken", [0, 1])
def test_orders_that_one_node_cannot_read_fail_on_all_nodes(tmp_path: Path, broken: int) -> None:
    folders = [FlushFolder(tmp_path / str(rank)) for rank in range(2)]
    # A folder in the place of an order cannot be read, as on a disk that fails.
    (tmp_path / str(broken) / FlushFolder(Path()).orders._folder / "step-1.json").mkdir(parents=True)

    def repair(comm: ThreadComm) -> str:
        folder = folders[comm.rank]
        cache = cast("CacheLevel", SimpleNamespace(is_lead=True))
        with pytest.raises(RankFailed) as failed:
            OrderRepair(cache, folder, JournalReader(folder.journal), comm).repair()
        return str(failed.value)

    messages: list[Any] = on_ranks(2, repair)
    assert all(f"Rank {broken}" in message and "IsADirectoryError" in message for message in messages)
