"""Rank 0 describes what all ranks have written, or all of them fail."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.checkpoint.commit.checkpoints import begin_save, write_into
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME
from penstock.checkpoint.engine import SaveChoice
from penstock.checkpoint.formats.description import read_manifest, read_metadata
from penstock.checkpoint.saver import Saver
from penstock.checkpoint.tools.verify import verify
from penstock.errors import RankFailed, StorageError
from penstock.storage import Storage
from penstock.storage.protocol import Sink, WrappedStorage
from penstock.storage.uri import open_here

NUM_RANKS = 3


def state_of(rank: int) -> dict[str, Any]:
    """Replicas, a tensor and objects of one rank, and objects that differ."""
    state: dict[str, Any] = {
        "model": {f"w{number}": torch.arange(number * 40.0).reshape(-1, 8) for number in range(6)},
        "scalar": torch.tensor(1.5),
        "step": 3,
        "position": rank,
    }
    return state | ({"only": torch.ones(5, dtype=torch.int8)} if rank == 2 else {})


def save(comm: ThreadComm, storage: Storage, transforms: tuple[str, ...] = ()) -> None:
    saver = Saver(transforms=transforms)
    prepared = saver.prepare(state_of(comm.rank), comm, SaveChoice())
    staged = prepared.stage("commit")
    write_into(begin_save(storage, "x", comm), prepared, staged, comm, facts={"step": 7})
    saver.close()


@pytest.mark.parametrize("transforms", [(), ("stream.zstd/1",)], ids=["plain", "zstd"])
def test_the_description_has_what_all_ranks_have_written(tmp_path: Path, transforms: tuple[str, ...]) -> None:
    on_ranks(NUM_RANKS, lambda comm: save(comm, open_here(str(tmp_path)), transforms))
    content = (tmp_path / "x" / METADATA_NAME).read_bytes()
    manifest = read_manifest((tmp_path / "x" / MANIFEST_NAME).read_bytes(), "here")
    described = read_metadata(content, "here")
    assert [facts.name for facts in described.tensors] == [
        *(f"model.w{number}" for number in range(6)),
        "scalar",
        "only",
    ]
    assert {stored.name for stored in described.objects} == {
        *("step", "position", "position@rank1", "position@rank2"),
    }
    assert described.paths["model.w1"] == ("model", "w1")
    assert (manifest.step, manifest.world_size, manifest.metadata_bytes) == (7, NUM_RANKS, len(content))
    assert verify(str(tmp_path / "x")).damage == ()


class BrokenStorage(WrappedStorage):
    """Cannot create the metadata."""

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        if key.endswith(METADATA_NAME):
            raise StorageError("the disk is full", uri=self.uri)
        return super().create(key, size_bytes)


def test_a_description_that_cannot_be_written_fails_on_all_ranks_and_leaves_them_in_step(
    tmp_path: Path,
) -> None:
    storage = open_here(str(tmp_path))

    def program(comm: ThreadComm) -> None:
        with pytest.raises(RankFailed, match="the disk is full"):
            save(comm, BrokenStorage(storage))
        save(comm, storage)

    on_ranks(NUM_RANKS, program)
    assert verify(str(tmp_path / "x")).damage == ()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
