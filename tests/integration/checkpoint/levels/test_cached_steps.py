"""A manager with caches, on gloo ranks that are hosts of their own: what is lost, damaged or left behind."""

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.file_faults import Call, faulty_calls
from tests.support.gloo_ranks import on_gloo_ranks
from tests.support.known_steps import files_below

from penstock.checkpoint.levels.flush import FlushFolder
from penstock.checkpoint.levels.options import DoubleParity, Flush, Partner, Scheme, Single, Xor
from penstock.checkpoint.manager import step_store
from penstock.checkpoint.manager.manager import Manager
from penstock.checkpoint.manager.policies import EverySteps
from penstock.checkpoint.tools.verify import verify
from penstock.errors import PenstockError, StorageError, UsageError

HOSTS = 4


def state_of(rank: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * step + 7)
    shared = torch.randn(300, 7, generator=generator)
    own = torch.arange(5000, dtype=torch.int64) * (rank + 1) + step
    return {"shared": shared, f"rank_{rank}": {"own": own, "step": step, "name": f"rank {rank}"}}


def blank(rank: int) -> dict[str, Any]:
    return {
        "shared": torch.zeros(300, 7),
        f"rank_{rank}": {"own": torch.zeros(5000, dtype=torch.int64), "step": -1, "name": ""},
    }


def manager_of(rank: int, root: Path, scheme: Scheme | list[Scheme], **choices: Any) -> Manager:
    return Manager(
        root / "durable",
        cache=root / f"host-{rank}",
        redundancy=scheme,
        failure_domain=f"host-{rank}",
        timeout_s=60,
        **{"flush": Flush(by="trainer"), **choices},
    )


def assert_same(found: dict[str, Any], rank: int, step: int) -> None:
    wanted = state_of(rank, step)
    assert torch.equal(found["shared"], wanted["shared"])
    assert torch.equal(found[f"rank_{rank}"]["own"], wanted[f"rank_{rank}"]["own"])
    assert found[f"rank_{rank}"]["step"] == step
    assert found[f"rank_{rank}"]["name"] == f"rank {rank}"


def save(rank: int, root: Path, scheme: Scheme | list[Scheme], steps: int, flush: Flush | None) -> list[int]:
    with manager_of(rank, root, scheme, flush=flush) as manager:
        for step in range(1, steps + 1):
            manager.save_async(step, state_of(rank, step))
    return manager.steps()


def restore(rank: int, root: Path, scheme: Scheme | list[Scheme]) -> tuple[int | None, list[str]]:
    with manager_of(rank, root, scheme) as manager:
        found = blank(rank)
        step = manager.restore(found)
        if step is not None:
            assert_same(found, rank, step)
        return step, [each.reason for each in manager.skipped_steps]


def lose(root: Path, *hosts: int) -> None:
    for host in hosts:
        shutil.rmtree(root / f"host-{host}")


@pytest.mark.parametrize(
    ("scheme", "hosts"),
    [(Partner(group=4), (2,)), (Xor(group=4), (0,)), (DoubleParity(group=4), (1, 3))],
    ids=["partner", "xor", "double parity"],
)
def test_lost_hosts_are_rebuilt_without_the_durable_level(
    scheme: Scheme, hosts: tuple[int, ...], tmp_path: Path
) -> None:
    on_gloo_ranks(HOSTS, save, tmp_path, scheme, 1, None)
    assert not list((tmp_path / "durable").glob("step-*"))
    lose(tmp_path, *hosts)
    assert on_gloo_ranks(HOSTS, restore, tmp_path, scheme) == [(1, [])] * HOSTS
    for host in hosts:
        assert (tmp_path / f"host-{host}/step-1/.metadata").exists(), "the lost cache is full again"


def test_one_loss_too_many_falls_back_to_the_durable_level(tmp_path: Path) -> None:
    scheme = Xor(group=4)
    steps = on_gloo_ranks(HOSTS, save, tmp_path, scheme, 2, Flush(every=2, bandwidth="1GiB/s", by="trainer"))
    assert steps == [[1, 2]] * HOSTS
    assert [path.name for path in (tmp_path / "durable").glob("step-*")] == ["step-2"]
    lose(tmp_path, 0, 1)
    assert on_gloo_ranks(HOSTS, restore, tmp_path, scheme) == [(2, [])] * HOSTS


def test_a_step_that_no_level_can_provide_is_skipped_with_a_reason(tmp_path: Path) -> None:
    scheme = Single()
    on_gloo_ranks(HOSTS, save, tmp_path, scheme, 3, Flush(every=2, by="trainer"))
    shutil.rmtree(tmp_path / "durable/step-3")
    lose(tmp_path, 3)
    results = on_gloo_ranks(HOSTS, restore, tmp_path, scheme)
    assert [step for step, _ in results] == [2] * HOSTS
    assert "no record of the share of rank 3" in results[0][1][0]


def test_a_flipped_byte_in_a_cache_is_found_and_rebuilt(tmp_path: Path) -> None:
    scheme = Xor(group=4)
    on_gloo_ranks(HOSTS, save, tmp_path, scheme, 1, None)
    victim = max((tmp_path / "host-2/step-1").glob("*.distcp"), key=lambda path: path.stat().st_size)
    before = victim.read_bytes()
    flipped = bytearray(before)
    flipped[len(flipped) // 2] ^= 1
    victim.write_bytes(flipped)
    assert on_gloo_ranks(HOSTS, restore, tmp_path, scheme) == [(1, [])] * HOSTS
    assert victim.read_bytes() == before


def restore_on_next_host(rank: int, root: Path, scheme: Scheme) -> int | None:
    host = (rank + 1) % HOSTS
    with manager_of(host, root, scheme) as manager:
        # Rank 1 is where the files of rank 2 are, now.
        found = blank(rank) | blank(2)
        step = manager.restore(found)
    assert step is not None
    assert_same(found, rank, step)
    assert_same(found, 2, step)
    return step


@pytest.mark.parametrize("scheme", [Partner(group=2), Xor(group=4), DoubleParity(group=4)], ids=str)
def test_a_damaged_share_is_rebuilt_for_ranks_that_have_moved(scheme: Scheme, tmp_path: Path) -> None:
    on_gloo_ranks(HOSTS, save, tmp_path, scheme, 1, None)
    spoil(max((tmp_path / "host-2/step-1").glob("*.distcp"), key=lambda path: path.stat().st_size))
    assert on_gloo_ranks(HOSTS, restore_on_next_host, tmp_path, scheme) == [1] * HOSTS


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def restore_spoilt(
    rank: int, root: Path, scheme: Scheme, places: list[str], lost: list[str]
) -> tuple[int | None, list[str]]:
    """Save, spoil one byte of each of `places`, lose files or hosts, restore."""
    save(rank, root, scheme, 1, None)
    dist.barrier()
    if rank == 0:
        for place in places:
            spoil(root / place)
        for path in (root / place for place in lost):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    dist.barrier()
    return restore(rank, root, scheme)


@pytest.mark.parametrize(
    ("places", "lost"),
    [
        (["host-1/step-1/parity-1.bin"], ["host-2"]),
        (["host-0/step-1/penstock.json", "host-3/step-1/.metadata"], []),
        (["host-1/step-1/penstock.json"], ["host-0"]),
        ([], ["host-0", "host-1/step-1/penstock.json"]),
    ],
    ids=[
        "parity beside a lost host",
        "what describes the step, on two hosts",
        "the manifest of the first host that is left",
        "no manifest on the first host that is left",
    ],
)
def test_damage_of_any_file_of_a_share_counts_as_its_loss(
    places: list[str], lost: list[str], tmp_path: Path
) -> None:
    scheme = DoubleParity(group=4)
    assert on_gloo_ranks(HOSTS, restore_spoilt, tmp_path, scheme, places, lost) == [(1, [])] * HOSTS
    first, original = (tmp_path / f"host-{host}/step-1/penstock.json" for host in (0, 2))
    assert first.read_bytes() == original.read_bytes()


def test_a_share_that_has_only_lost_its_manifest_still_rebuilds_others(tmp_path: Path) -> None:
    lost = ["host-0", "host-1/step-1/penstock.json"]
    assert on_gloo_ranks(HOSTS, restore_spoilt, tmp_path, Xor(group=4), [], lost) == [(1, [])] * HOSTS


def save_many(rank: int, root: Path) -> tuple[list[int], list[int]]:
    with manager_of(
        rank,
        root,
        Xor(group=2),
        # So slow that no step is durable before all are saved.
        flush=Flush(every=3, by="trainer", bandwidth="32KiB/s"),
        keep_cached=2,
        keep=1,
    ) as manager:
        for step in range(1, 8):
            manager.save(step, state_of(rank, step))
        seen = manager.steps()
    return seen, sorted(int(path.name[5:]) for path in (root / f"host-{rank}").glob("step-*"))


def test_old_steps_leave_the_caches_and_the_durable_level_apart(tmp_path: Path) -> None:
    results = on_gloo_ranks(2, save_many, tmp_path)
    for _, cached in results:
        assert cached == [6, 7], "what was still being flushed at the last save stayed until it was durable"
    assert [path.name for path in (tmp_path / "durable").glob("step-*")] == ["step-7"]


def flush_badly(rank: int, root: Path, scheme: Scheme) -> str:
    durable = root / "durable"
    with manager_of(rank, root, scheme) as manager:
        if rank == 0:
            durable.mkdir(exist_ok=True)
            (durable / "step-1").mkdir()
            (durable / "step-1/notes.txt").write_text("not a checkpoint")
        manager.save(1, state_of(rank, 1))
        try:
            manager.close()
        except PenstockError as error:
            return str(error)
    return "nothing was raised"


def test_a_failed_flush_is_reported_and_the_step_stays_cached(tmp_path: Path) -> None:
    for told in on_gloo_ranks(2, flush_badly, tmp_path, Single()):
        assert "making durable step 1 in the background" in told
        assert "notes.txt" in told
    assert on_gloo_ranks(2, restore, tmp_path, Single())[0][0] == 1


def test_what_a_trainer_could_not_flush_the_next_one_does(tmp_path: Path) -> None:
    on_gloo_ranks(2, flush_badly, tmp_path, Xor(group=2))
    folder = FlushFolder(tmp_path / "host-0")
    state = folder.states()[1]
    assert (state.phase, state.is_lasting) == ("failing", True)
    assert "notes.txt" in state.reason
    shutil.rmtree(tmp_path / "durable/step-1")
    # Whatever is lost meanwhile is rebuilt before it is flushed.
    lose(tmp_path, 1)
    assert on_gloo_ranks(2, restore, tmp_path, Xor(group=2)) == [(1, [])] * 2
    assert verify(str(tmp_path / "durable/step-1")).is_whole
    assert folder.notes() == {}


def test_a_step_that_is_to_become_durable_stays_cached_until_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flush_badly(0, tmp_path, Single())
    with manager_of(0, tmp_path, Single(), flush=None, keep_cached=1) as manager:
        for step in (2, 3):
            manager.save(step, state_of(0, step))
    assert "Step 1 of an earlier job is not durable yet: run `penstock checkpoint flush`" in caplog.text
    assert sorted(path.name for path in tmp_path.glob("host-0/step-*")) == ["step-1", "step-3"]


def save_when_due(rank: int, root: Path) -> list[int]:
    with Manager(root, save_policy=EverySteps(3), timeout_s=60) as manager:
        for step in range(1, 8):
            if manager.should_save(step):
                manager.save(step, state_of(rank, step))
        return manager.steps()


def test_all_ranks_agree_when_a_save_is_due(tmp_path: Path) -> None:
    assert on_gloo_ranks(2, save_when_due, tmp_path) == [[3, 6]] * 2


def test_alone_a_cache_needs_no_group(tmp_path: Path) -> None:
    with manager_of(0, tmp_path, [Single()]) as manager:
        manager.save(1, state_of(0, 1))
        found = blank(0)
        assert manager.restore(found) == 1
        assert_same(found, 0, 1)
    with pytest.raises(UsageError, match="failure domains"):
        manager_of(0, tmp_path, Xor(group=2, strict=True))
    with pytest.raises(UsageError, match="keep_cached must be a whole number from 1"):
        manager_of(0, tmp_path, Single(), keep_cached=0)


def test_a_cache_with_the_steps_of_another_run_is_refused_until_it_is_empty(tmp_path: Path) -> None:
    def open_run(name: str) -> Manager:
        return Manager(tmp_path / name, cache=tmp_path / "cache", flush=None, keep_cached=1)

    with open_run("first") as manager:
        manager.save(1, state_of(0, 1))
    with pytest.raises(
        UsageError, match=r"steps of another run, file://.*/first, and not of file://.*/second"
    ):
        open_run("second")
    with open_run("first") as manager:
        assert manager.restore(blank(0)) == 1
    shutil.rmtree(tmp_path / "cache/step-1")
    with open_run("second") as manager:
        assert manager.restore(blank(0)) is None
        manager.save(2, state_of(0, 2))
    with pytest.raises(UsageError, match=r"steps of another run, file://.*/second"):
        open_run("first")


def open_on_one_folder(rank: int, root: Path, cache: str) -> str:
    try:
        Manager(root / "durable", cache=root / cache, redundancy=Single(), timeout_s=60).close()
    except PenstockError as error:
        return str(error)
    return "it was accepted"


@pytest.mark.parametrize("cache", ["durable", "link"])
def test_a_cache_that_is_the_durable_folder_is_refused(cache: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("durable")
    (tmp_path / "durable").mkdir()
    for told in on_gloo_ranks(2, open_on_one_folder, tmp_path, cache):
        assert f"The cache is the durable folder itself, file://{tmp_path}/durable" in told
        assert f"file://{tmp_path}/{cache}" in told


def test_a_cache_within_the_durable_folder_is_one_of_its_own(tmp_path: Path) -> None:
    with Manager(tmp_path, cache=tmp_path / "cache", flush=Flush(by="trainer"), keep_cached=1) as manager:
        for step in (1, 2):
            manager.save(step, state_of(0, step))
    assert manager.steps() == [1, 2]
    assert [path.name for path in tmp_path.glob("cache/step-*")] == ["step-2"]


def test_a_cached_folder_that_holds_another_step_is_never_restored_as_this_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with cached_alone(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state_of(0, step))
    for lost, other in ((1, 2), (2, 1)):
        cache = tmp_path / f"cache-{lost}"
        shutil.copytree(tmp_path / "cache", cache)
        shutil.rmtree(cache / f"step-{lost}")
        shutil.copytree(cache / f"step-{other}", cache / f"step-{lost}")
        with Manager(tmp_path / "run", cache=cache, flush=None) as manager:
            found = blank(0)
            assert manager.restore(found) == other
            assert_same(found, 0, other)
            with pytest.raises(StorageError, match=f"Step {lost} cannot be restored"):
                manager.restore(found, step=lost)
        assert f"It holds step-{other}" in caplog.text
    assert "Skipping step 2: " in caplog.text


class FailBelow:
    """Files below a folder cannot be opened, a number of times."""

    def __init__(self, folder: Path, times: float = math.inf) -> None:
        self._folder, self._left = str(folder), times

    def around(self, name: str, call: Call) -> Call:
        def failing(path: str, *arguments: Any) -> Any:
            if path.startswith(f"{self._folder}/") and self._left > 0:
                self._left -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(path, *arguments)

        return failing if name == "open" else call


def cached_alone(root: Path, *faults: FailBelow) -> Manager:
    cache = files_below(root / "cache", faulty_calls(*faults))
    return Manager(root / "run", cache=cache, flush=None, keep_cached=None)


def test_no_older_step_is_restored_because_a_cache_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_store, "RETRY_PAUSES_S", (0.0,))
    with cached_alone(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state_of(0, step))
    newest = tmp_path / "cache/step-2"
    with (
        cached_alone(tmp_path, FailBelow(newest)) as manager,
        pytest.raises(StorageError, match=r"Step 2 could not be read.*restore\(step=1\)"),
    ):
        manager.restore(blank(0))
    with cached_alone(tmp_path, FailBelow(newest, times=1)) as manager:
        found = blank(0)
        assert manager.restore(found) == 2
        assert_same(found, 0, 2)
    # What is damaged is damaged, whatever else is well.
    (newest / ".metadata").write_bytes(b"other")
    with cached_alone(tmp_path) as manager:
        assert manager.restore(blank(0)) == 1


def test_a_step_in_doubt_is_not_removed_because_its_cache_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_store, "RETRY_PAUSES_S", (0.0,))
    with cached_alone(tmp_path) as manager:
        manager.save(1, state_of(0, 1))
    doubted = tmp_path / "cache/step-1"
    (tmp_path / "cache/.penstock-doubt-step-1").write_bytes(b"")
    with (
        cached_alone(tmp_path, FailBelow(doubted)) as manager,
        pytest.raises(StorageError, match="Cannot determine whether step-1 was committed"),
    ):
        manager.restore(blank(0))
    with cached_alone(tmp_path) as manager:
        assert manager.restore(blank(0)) == 1


def test_a_step_whose_note_cannot_be_read_stays_cached(tmp_path: Path) -> None:
    flush_badly(0, tmp_path, Single())
    (tmp_path / "host-0/.penstock-flush/step-1.json").write_bytes(b"")
    with manager_of(0, tmp_path, Single(), flush=None, keep_cached=1) as manager:
        for step in (2, 3):
            manager.save(step, state_of(0, step))
    assert sorted(path.name for path in tmp_path.glob("host-0/step-*")) == ["step-1", "step-3"]
    folder = FlushFolder(tmp_path / "host-0")
    shutil.rmtree(folder.path)
    folder.path.symlink_to(folder.path)
    with pytest.raises(StorageError, match="Listing failed"):
        folder.notes()
