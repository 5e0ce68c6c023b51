"""Files that programs write themselves, without a cache: committed whole or not at all, and found again."""

from pathlib import Path

import pytest
import torch
from tests.support.gloo_ranks import on_gloo_ranks

from penstock.checkpoint.formats.description import read_manifest
from penstock.checkpoint.manager.manager import Manager
from penstock.checkpoint.manager.user_files import parse_writer_rank
from penstock.checkpoint.tools.verify import verify
from penstock.errors import ObjectNotFound, PenstockError, StorageError, Unavailable, UsageError


def put(manager: Manager, name: str | int, content: bytes = b"x" * 5000) -> None:
    with manager.output(name) as out:
        out.path("rank_0.pt").write_bytes(content)
        out.path("empty").write_bytes(b"")


def put_badly(manager: Manager) -> None:
    with manager.output(2) as out:
        out.path("a").write_bytes(b"half")
        raise KeyError("no such thing")


def test_files_are_committed_with_their_sums_and_found_again(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        put(manager, "step-7")
        assert manager.steps() == [7]
        with manager.restart() as found:
            assert found.step == 7
            assert found.path("rank_0.pt").read_bytes() == b"x" * 5000
            assert found.path("empty").read_bytes() == b""
    assert verify(tmp_path / "step-7").is_whole
    manifest = read_manifest((tmp_path / "step-7/penstock.json").read_bytes(), "here")
    assert [(file.name, parse_writer_rank(manifest, file)) for file in manifest.files] == [
        ("rank_0.pt", 0),
        ("empty", 0),
    ]


def test_nothing_is_visible_before_the_commit(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager, manager.restart() as found:
        assert found.step is None
        with pytest.raises(UsageError, match="No step was ever committed"):
            found.path("rank_0.pt")


def test_an_invalid_set_and_one_that_raised_leave_nothing(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        with manager.output(1) as out:
            out.path("a").write_bytes(b"half")
            out.mark_invalid()
        assert not out.is_committed
        with pytest.raises(KeyError, match="no such thing"):
            put_badly(manager)
        assert manager.steps() == []
    assert list(tmp_path.iterdir()) == []


def test_a_set_replaces_that_of_its_name_and_old_steps_go(tmp_path: Path) -> None:
    with Manager(tmp_path, keep=2) as manager:
        for step in (1, 2, 3):
            put(manager, step)
        put(manager, 3, b"new")
        assert manager.steps() == [2, 3]
        with manager.restart() as found:
            assert found.path("rank_0.pt").read_bytes() == b"new"


def test_results_have_names_of_their_own_and_stay(tmp_path: Path) -> None:
    with Manager(tmp_path, keep=1) as manager:
        with manager.output("fields-3", checkpoint=False) as out:
            out.path("u.bin").write_bytes(b"result")
        for step in (1, 2):
            put(manager, step)
        assert manager.steps() == [2]
    assert (tmp_path / "fields-3/u.bin").read_bytes() == b"result"
    assert out.uri.endswith("fields-3")


@pytest.mark.parametrize(
    ("name", "checkpoint", "told"),
    [
        ("results", True, "is not a step"),
        ("step-3", False, "name of a step"),
        (".hidden", False, "plain name"),
    ],
)
def test_names_must_say_what_a_set_is(name: str, *, checkpoint: bool, told: str, tmp_path: Path) -> None:
    with Manager(tmp_path) as manager, pytest.raises(UsageError, match=told):
        manager.output(name, checkpoint=checkpoint)


@pytest.mark.parametrize("name", ["a/b", ".metadata", "penstock.json", "parity-1.bin", "../x", ""])
def test_files_have_plain_names_that_are_not_ours(name: str, tmp_path: Path) -> None:
    with Manager(tmp_path) as manager, manager.output(1) as out:
        with pytest.raises(PenstockError, match=r"plain|Invalid file name"):
            out.path(name)
        out.mark_invalid()


def test_a_path_that_was_asked_for_and_not_written_fails_the_set(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        with pytest.raises(UsageError, match="wrote no file to it"), manager.output(1) as out:
            out.path("a")
        with pytest.raises(UsageError, match="Not a regular file"), manager.output(1) as out:
            out.path("a").mkdir()
        with pytest.raises(StorageError, match="no rank wrote"), manager.output(1) as out:
            out.path("a").with_name("b").write_bytes(out.path("a").write_bytes(b"routed").to_bytes())
        assert manager.steps() == []


def test_after_an_invalid_step_the_previous_one_is_returned(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        for step in (1, 2):
            put(manager, step)
        with manager.restart() as found:
            assert found.step == 2
            found.mark_invalid()
        with manager.restart() as found:
            assert found.step == 1
            found.mark_invalid()
        assert [each.step for each in manager.skipped_steps] == [2]
        with pytest.raises(StorageError, match=r"Step 2 .*: rank 0 marked it invalid; Step 1 .*: rank 0"):
            manager.restart()


def test_a_flipped_byte_is_found_before_a_path_is_given(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        for step in (1, 2):
            put(manager, step)
        victim = tmp_path / "step-2/rank_0.pt"
        victim.write_bytes(b"x" * 4999 + b"y")
        with manager.restart() as found:
            assert found.step == 1
        assert "rank_0.pt" in manager.skipped_steps[0].reason
        with pytest.raises(ObjectNotFound, match="has no file other"):
            found.path("other")


def test_states_and_user_files_are_distinguished(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        manager.save(1, {"a": torch.ones(3)})
        put(manager, 2)
        manager.save(3, {"a": torch.full((3,), 3.0)})
        with manager.restart() as found:
            assert found.step == 2
        assert "contains a state" in manager.skipped_steps[0].reason
        put(manager, 4)
        state = {"a": torch.zeros(3)}
        assert manager.restore(state) == 3
        assert torch.equal(state["a"], torch.full((3,), 3.0))
        assert "no state" in manager.skipped_steps[0].reason


def test_a_storage_without_paths_is_refused() -> None:
    with Manager("mem://own-files") as manager, pytest.raises(Unavailable, match=r"not a file system"):
        put(manager, 1)


def by_two(rank: int, root: Path) -> list[str]:
    told = []
    with Manager(root, timeout_s=60) as manager:

        def attempt(name: str, *, spoil: str) -> None:
            try:
                with manager.output(name) as out:
                    out.path("same" if spoil == "same" else f"rank_{rank}").write_bytes(bytes([rank]) * 100)
                    if rank == 1 and spoil == "invalid":
                        out.mark_invalid()
                    if rank == 1 and spoil == "raise":
                        int("cannot write this")
            except (PenstockError, ValueError) as error:
                told.append(f"{type(error).__name__}: {error}")
            else:
                told.append("committed" if out.is_committed else "discarded")

        for step, spoil in enumerate(["", "invalid", "raise", "same"], 1):
            attempt(f"step-{step}", spoil=spoil)
        told.append(str(manager.steps()))
        with manager.restart() as found:
            told.append(str(found.path(f"rank_{rank}").read_bytes() == bytes([rank]) * 100))
            told.append(str(found.path(f"rank_{1 - rank}").read_bytes() == bytes([1 - rank]) * 100))
    return told


def test_one_rank_that_rejects_files_rejects_them_on_all(tmp_path: Path) -> None:
    first, second = on_gloo_ranks(2, by_two, tmp_path)
    assert first[:2] == second[:2] == ["committed", "discarded"]
    assert "Rank 1" in first[2]
    assert "cannot write this" in first[2]
    assert second[2].startswith("ValueError: invalid literal")
    assert "Ranks 0 and 1 both wrote same" in first[3]
    assert first[4:] == second[4:] == ["[1]", "True", "True"]
