"""From a user's words to a place: paths and URIs, and what lies there."""

from pathlib import Path

import pytest
from tests.support.known_steps import find_checkpoint, save_known

from penstock.checkpoint.commit.checkpoints import CheckpointRef, open_parent, split_path
from penstock.cluster.comm import SoloComm
from penstock.errors import ObjectNotFound, UsageError


@pytest.mark.parametrize(
    ("path", "above", "name"),
    [
        ("/data/run/step-1", "/data/run", "step-1"),
        ("/data/run/step-1/", "/data/run", "step-1"),
        ("/step-1", "/", "step-1"),
        ("file:///data/step-1", "/data", "step-1"),
        ("direct:///data/step-1?fsync=no", "direct:///data?fsync=no", "step-1"),
        ("/data?x=y/step-1", "/data?x=y", "step-1"),
        ("s3://bucket/step-1?client=minio&attempts=2", "s3://bucket?client=minio&attempts=2", "step-1"),
        (Path("/data/step-1"), "/data", "step-1"),
    ],
)
def test_a_path_splits_into_storage_and_name(path: str | Path, above: str, name: str) -> None:
    assert split_path(path) == (above, name)


@pytest.mark.parametrize("path", ["/", "file:///", "s3://bucket", "s3://bucket/"])
def test_the_root_of_a_storage_is_not_a_checkpoint(path: str) -> None:
    with pytest.raises(UsageError, match=r"storage root.*Add the name"):
        split_path(path)


def test_a_committed_checkpoint_is_found_by_its_path(tmp_path: Path) -> None:
    storage, name = open_parent(tmp_path / "one")
    with pytest.raises(ObjectNotFound, match="No checkpoint is called one"):
        find_checkpoint(tmp_path / "one")
    committed = save_known(storage, name, 0, SoloComm())
    found = find_checkpoint(tmp_path / "one")
    assert found.committed == committed
    assert found.uri == f"file://{tmp_path}/one"
    assert found.key("a") == "one/a"


def test_an_unreadable_manifest_makes_a_checkpoint_incomplete(tmp_path: Path) -> None:
    storage, name = open_parent(tmp_path / "one")
    assert not CheckpointRef(storage, save_known(storage, name, 0, SoloComm())).is_whole()
