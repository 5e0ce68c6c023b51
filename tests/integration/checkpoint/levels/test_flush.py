"""What flushers make of notes in caches: here, in a thread of the trainer, in a process that outlives it."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.child_processes import exit_code_of
from tests.support.flush_daemons import daemons_below, ending_daemons, wait_until
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint.state_dict_loader import load as stock_load

from penstock.checkpoint.formats.description import read_manifest
from penstock.checkpoint.levels import tiered_store
from penstock.checkpoint.levels.flush import Flusher, FlushFolder, FlushNote, FlushState
from penstock.checkpoint.levels.options import Flush, Xor
from penstock.checkpoint.manager.manager import Manager
from penstock.checkpoint.tools.verify import verify
from penstock.errors import OutOfSpace, RankFailed, StorageError
from penstock.storage.capabilities import prefer_direct_access
from penstock.storage.protocol import WrappedStorage
from penstock.storage.residency import count_by_mincore
from penstock.storage.uri import open_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.storage import Storage
    from penstock.storage.protocol import Sink

NUM_ITEMS = 40_000


@pytest.fixture(autouse=True)
def _no_daemon_outlives_its_test(tmp_path: Path) -> Iterator[None]:
    with ending_daemons(tmp_path):
        yield


class Watched(WrappedStorage):
    """A storage that notes which data files are created, and refuses some."""

    def __init__(self, inside: Storage, created: list[str], refused: Callable[[str], bool]) -> None:
        super().__init__(inside)
        self.created = created
        self._refused = refused

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        name = key.rpartition("-")[2].rpartition("/")[2]
        if self._refused(name):
            raise OutOfSpace("No space is left", uri=f"{self.uri}/{key}")
        if name.endswith(".distcp"):
            self.created.append(name)
        return super().create(key, size_bytes)

    def past_cache(self, reads: str | None = None) -> Watched:
        return Watched(prefer_direct_access(self.inside, reads=reads), self.created, self._refused)


def durable_of(root: Path, refused: Callable[[str], bool] = lambda _: False) -> Watched:
    return Watched(open_here(root / "durable"), [], refused)


def state_of(step: int) -> dict[str, Any]:
    return {"a": torch.full((NUM_ITEMS,), float(step)), "b": torch.arange(NUM_ITEMS) + step}


def save_cached(root: Path, *steps: int) -> None:
    with Manager(root / "durable", cache=root / "cache", flush=None, keep_cached=None) as manager:
        for step in steps:
            manager.save(step, state_of(step))


def note(root: Path, step: int, cache: str = "cache", **choices: Any) -> FlushFolder:
    """Note that the save of a step that is in the cache now is to become durable."""
    folder = FlushFolder(root / cache)
    manifest = read_manifest((folder.cache / f"step-{step}/penstock.json").read_bytes(), "here")
    folder.put(step, FlushNote(save_id=manifest.save_id, durable=f"file://{root}/durable", **choices))
    return folder


def flush(root: Path, cache: str = "cache", durable: Storage | None = None) -> dict[int, FlushState]:
    return Flusher(open_here(root / cache), durable=durable).run(patience_s=0.5)


def durable(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "durable").iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_flushed_step_is_byte_for_byte_what_was_cached_and_stock_torch_loads_it(tmp_path: Path) -> None:
    save_cached(tmp_path, 1)
    folder = note(tmp_path, 1)
    assert flush(tmp_path)[1].phase == "durable"
    cached, flushed = tmp_path / "cache/step-1", tmp_path / "durable/step-1"
    for path in flushed.iterdir():
        assert path.read_bytes() == (cached / path.name).read_bytes(), path.name
    state = state_of(0)
    stock_load(state, checkpoint_id=str(flushed), no_dist=True)
    assert torch.equal(state["b"], state_of(1)["b"])
    assert durable(tmp_path) == ["latest", "step-1"]
    assert folder.notes() == {}


def test_whole_files_are_not_copied_again_after_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_cached(tmp_path, 1)
    note(tmp_path, 1)
    first, second = sorted(path.name for path in (tmp_path / "cache/step-1").glob("*.distcp"))
    tried: list[str] = []

    def is_refused(name: str) -> bool:
        tried.append(name)
        return name == second

    full = durable_of(tmp_path, refused=is_refused)
    assert "No space is left" in flush(tmp_path, durable=full)[1].reason
    assert set(full.created) == {first}
    assert tried.count(second) > 1
    assert caplog.text.count("No space is left") == 1
    again = durable_of(tmp_path)
    assert flush(tmp_path, durable=again)[1].phase == "durable"
    assert again.created == [second]
    assert verify(tmp_path / "durable/step-1").is_whole
    assert durable(tmp_path) == ["latest", "step-1"]


def interrupt(root: Path) -> list[str]:
    """Flush, and get Ctrl-C while the first files are copied. They go on once the flush waits for them."""
    main = threading.main_thread().ident
    assert main is not None
    numbers = itertools.count()

    def wait_for_main_in(function: Callable[..., Any]) -> None:
        def is_in() -> bool:
            frame = sys._current_frames().get(main)
            while frame is not None and frame.f_code is not function.__code__:
                frame = frame.f_back
            return frame is not None

        wait_until(is_in, f"the flush is in {function.__name__}")

    def wait(name: str) -> bool:
        if name.endswith(".distcp"):
            if next(numbers) == 0:
                wait_for_main_in(Future.result)
                signal.pthread_kill(main, signal.SIGINT)
            wait_for_main_in(ThreadPoolExecutor.shutdown)
        return False

    watched = durable_of(root, refused=wait)
    with pytest.raises(KeyboardInterrupt):
        flush(root, durable=watched)
    return watched.created


def test_after_ctrl_c_no_file_is_begun(tmp_path: Path) -> None:
    with Manager(tmp_path / "durable", cache=tmp_path / "cache", flush=None, writers=8) as manager:
        manager.save(1, {str(number): torch.ones(NUM_ITEMS) for number in range(16)})
    note(tmp_path, 1, threads=2)
    assert len(list((tmp_path / "cache/step-1").glob("*.distcp"))) == 8
    assert len(interrupt(tmp_path)) == 2
    assert flush(tmp_path)[1].phase == "durable"


def test_bytes_that_are_damaged_in_the_cache_never_become_durable(tmp_path: Path) -> None:
    save_cached(tmp_path, 1)
    note(tmp_path, 1)
    victim = min((tmp_path / "cache/step-1").glob("*.distcp"))
    flip(victim)
    state = flush(tmp_path)[1]
    assert state.is_lasting
    assert "is damaged in the cache" in state.reason
    assert not list((tmp_path / "durable").glob("step-*"))
    flip(victim)  # mended, as a restore would
    assert flush(tmp_path)[1].phase == "durable"


def test_a_pending_step_whose_folder_holds_another_one_is_a_lasting_failure(tmp_path: Path) -> None:
    save_cached(tmp_path, 1, 2)
    folder = note(tmp_path, 2)
    shutil.rmtree(tmp_path / "cache/step-2")
    shutil.copytree(tmp_path / "cache/step-1", tmp_path / "cache/step-2")
    state = flush(tmp_path)[2]
    assert (state.phase, state.is_lasting) == ("failing", True)
    assert "holds step 1, not step 2" in state.reason
    assert list(folder.notes()) == [2]


def test_the_newest_comes_first_and_what_retention_would_remove_at_once_is_dropped(tmp_path: Path) -> None:
    save_cached(tmp_path, 1, 2, 3)
    for step in (1, 2, 3):
        note(tmp_path, step, keep=2)
    watched = durable_of(tmp_path)
    states = flush(tmp_path, durable=watched)
    assert [states[step].phase for step in (1, 2, 3)] == ["superseded", "durable", "durable"]
    assert "3, 2 are durable" in states[1].reason
    assert durable(tmp_path) == ["latest", "step-2", "step-3"]
    assert len(watched.created) == 4, "nothing of step 1 was copied"


def test_a_run_that_begins_again_is_flushed_next_to_the_newer_steps_of_another(tmp_path: Path) -> None:
    save_cached(tmp_path, 1, 8, 9)
    for step in (8, 9):
        note(tmp_path, step, keep=2)
    flush(tmp_path)
    note(tmp_path, 1, keep=2)
    assert flush(tmp_path)[1].phase == "durable"
    assert durable(tmp_path) == ["latest", "step-1", "step-8", "step-9"]


def test_a_step_that_was_saved_again_without_a_flush_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    save_cached(tmp_path, 1)
    folder = note(tmp_path, 1)
    save_cached(tmp_path, 1)
    assert flush(tmp_path) == {}
    assert folder.notes() == {}
    assert not (tmp_path / "durable").exists()


def test_an_older_durable_step_of_the_name_is_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        save_cached(tmp_path, 1)
        note(tmp_path, 1)
        flush(tmp_path)
        cached, flushed = (tmp_path / level / "step-1/penstock.json" for level in ("cache", "durable"))
        assert cached.read_bytes() == flushed.read_bytes()
    assert durable(tmp_path) == ["latest", "step-1"]


def test_a_note_that_cannot_be_parsed_does_not_affect_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_cached(tmp_path, 1)
    folder = note(tmp_path, 1)
    (folder.path / "step-7.json").write_text('{"stop": 3}')
    assert flush(tmp_path)[1].phase == "durable"
    assert "step-7.json cannot be parsed" in caplog.text


def test_pending_steps_are_flushed_once_the_durable_level_is_back(tmp_path: Path) -> None:
    save_cached(tmp_path, 1)
    (tmp_path / "durable").write_text("not mounted")
    note(tmp_path, 1)
    assert flush(tmp_path)[1].phase == "failing"
    (tmp_path / "durable").unlink()
    assert flush(tmp_path)[1].phase == "durable"


def save_on_two(rank: int, root: Path) -> None:
    with Manager(
        root / "durable", cache=root / f"node-{rank}", flush=None, failure_domain=str(rank), timeout_s=60
    ) as manager:
        for step in (1, 2):
            manager.save(step, {f"rank_{rank}": torch.full((5000,), rank), "shared": torch.arange(5000)})


@pytest.fixture(scope="module")
def saved_on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps in the caches of two nodes."""
    root = tmp_path_factory.mktemp("two-nodes")
    on_gloo_ranks(2, save_on_two, root)
    return root


@pytest.fixture
def two_nodes(saved_on_two: Path, tmp_path: Path) -> Path:
    """The same, the first noted on both nodes."""
    for name in ("node-0", "node-1"):
        shutil.copytree(saved_on_two / name, tmp_path / name)
        note(tmp_path, 1, name)
    return tmp_path


def test_nodes_copy_their_own_files_and_the_last_one_publishes(two_nodes: Path) -> None:
    state = flush(two_nodes, "node-1")[1]
    assert (state.phase, state.reason) == ("waiting", "the files of other nodes")
    assert not list((two_nodes / "durable").glob("step-*"))
    assert flush(two_nodes, "node-0")[1].phase == "durable"
    assert verify(two_nodes / "durable/step-1").is_whole
    assert flush(two_nodes, "node-1")[1].phase == "durable"
    assert durable(two_nodes) == ["latest", "step-1"]


def test_flushers_of_two_nodes_at_once_publish_once(two_nodes: Path) -> None:
    threads = [threading.Thread(target=flush, args=(two_nodes, name)) for name in ("node-0", "node-1") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verify(two_nodes / "durable/step-1").is_whole
    assert durable(two_nodes) == ["latest", "step-1"]
    assert not FlushFolder(two_nodes / "node-0").notes()
    assert not FlushFolder(two_nodes / "node-1").notes()


def test_a_step_that_is_published_after_a_newer_one_is_not_kept_beside_it(two_nodes: Path) -> None:
    flush(two_nodes, "node-0")  # step 1, of which node 1 has copied nothing
    for name, step in itertools.product(("node-0", "node-1"), (1, 2)):
        note(two_nodes, step, name, keep=1, threads=1)
    num_files = len(list((two_nodes / "node-1/step-2").glob("*.distcp")))

    def publish_newer(name: str) -> bool:
        if name.endswith(".distcp") and len(copied.created) == num_files:
            flush(two_nodes, "node-0")
            assert "step-2" in durable(two_nodes)
        return False

    copied = durable_of(two_nodes, refused=publish_newer)
    flush(two_nodes, "node-1", copied)
    assert durable(two_nodes) == ["latest", "step-2"]


def test_a_draft_that_was_removed_is_copied_again_by_all_nodes(two_nodes: Path) -> None:
    flush(two_nodes, "node-1")
    (draft,) = (two_nodes / "durable").glob(".penstock-save-*-step-1")
    shutil.rmtree(draft)
    assert flush(two_nodes, "node-0")[1].phase == "waiting"
    assert flush(two_nodes, "node-1")[1].phase == "durable"
    assert flush(two_nodes, "node-0")[1].phase == "durable"


def die_at(root: Path, number: int) -> None:
    """Flush, and be killed when the given file is created."""
    counted = itertools.count(1)

    def kill(_: str) -> bool:
        if next(counted) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    flush(root, "node-0", durable_of(root, kill))


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6])
def test_killed_at_any_file_the_next_flusher_does_the_rest(number: int, two_nodes: Path) -> None:
    flush(two_nodes, "node-1")
    assert exit_code_of(die_at, two_nodes, number) == -signal.SIGKILL
    flush(two_nodes, "node-1")  # its files may have gone with what was killed
    assert flush(two_nodes, "node-0")[1].phase == "durable"
    assert flush(two_nodes, "node-1").get(1, FlushState(phase="durable")).phase == "durable"
    assert verify(two_nodes / "durable/step-1").is_whole


def resident_pages(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return count_by_mincore(descriptor, path.stat().st_size)[0]
    finally:
        os.close(descriptor)


def test_a_flush_leaves_the_page_cache_as_it_was(tmp_path: Path) -> None:
    if "direct" not in prefer_direct_access(open_here(str(tmp_path))).uri:
        pytest.skip("this file system has no O_DIRECT")
    save_cached(tmp_path, 1)
    files = list((tmp_path / "cache/step-1").glob("*.distcp"))
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    before = [resident_pages(path) for path in files]
    note(tmp_path, 1)
    flush(tmp_path)
    assert [resident_pages(path) for path in files] == before
    # Nor does what was written stay in memory that training could use.
    assert sum(resident_pages(path) for path in (tmp_path / "durable/step-1").glob("*.distcp")) <= len(files)


# With a manager: the detached flusher, the trainer's thread, and what the trainer learns.


def manager_of(root: Path, **choices: Any) -> Manager:
    settings = {"flush": Flush(by="daemon"), "timeout_s": 60, **choices}
    return Manager(root / "durable", cache=root / "cache", **settings)


def steps_of(root: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in (root / "durable").glob("step-*/.metadata"))


@pytest.mark.parametrize("by", ["daemon", "trainer"])
def test_without_background_a_save_returns_when_its_step_is_durable(by: Any, tmp_path: Path) -> None:
    with manager_of(tmp_path, flush=Flush(by=by, background=False, every=2)) as manager:
        manager.save(1, state_of(1))
        assert steps_of(tmp_path) == []
        manager.save(2, state_of(2))
        assert steps_of(tmp_path) == [2]


def test_a_draft_that_another_node_publishes_during_the_last_look_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_cached(tmp_path, 1)
    note(tmp_path, 1)
    looks: Iterator[dict[str, int]] = iter([{}, {}])
    commits = iter([False, True])
    # Its files are there no more, because the draft has become the step.
    monkeypatch.setattr("penstock.checkpoint.levels.flush._SharedDraft.sizes", lambda _: next(looks))
    monkeypatch.setattr("penstock.checkpoint.levels.flush.is_committed", lambda *_: next(commits))
    state = flush(tmp_path)[1]
    assert (state.phase, state.reason) == ("durable", "")


@pytest.mark.parametrize("by", ["daemon", "trainer"])
def test_closing_flushes_the_newest_step_whatever_its_turn(by: Any, tmp_path: Path) -> None:
    with manager_of(tmp_path, flush=Flush(by=by, every=2)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
    assert steps_of(tmp_path) == [2, 3]
    assert FlushFolder(tmp_path / "cache").notes() == {}


def test_after_an_error_a_warning_names_the_step_that_is_only_cached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The other ranks may have no error, and so would not flush their files.
    def fail() -> None:
        with manager_of(tmp_path, flush=Flush(every=2)) as manager:
            for step in (1, 2, 3):
                manager.save(step, state_of(step))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert steps_of(tmp_path) == [2]
    assert "Step 3 is in the caches only" in caplog.text


def test_closing_flushes_nothing_without_a_flush(tmp_path: Path) -> None:
    with manager_of(tmp_path, flush=None) as manager:
        manager.save(1, state_of(1))
    assert steps_of(tmp_path) == []


def save_and_die(root: Path) -> None:
    manager = manager_of(root)
    manager.save(1, state_of(1))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_detached_flusher_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    assert exit_code_of(save_and_die, tmp_path) == -signal.SIGKILL
    wait_until(lambda: steps_of(tmp_path) == [1], "step 1 is durable")
    wait_until(lambda: not daemons_below(tmp_path), "the flusher ends by itself")
    assert FlushFolder(tmp_path / "cache").notes() == {}


def test_a_detached_flusher_has_the_lowest_priority_and_a_killed_one_is_replaced(tmp_path: Path) -> None:
    with manager_of(tmp_path, flush=Flush(by="daemon", bandwidth="200KiB/s")) as manager:
        manager.save(1, state_of(1))
        folder = FlushFolder(tmp_path / "cache")
        wait_until(lambda: folder.is_locked() and folder.progress().pid != 0, "a flusher works")
        pid = folder.progress().pid
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert os.getsid(pid) != os.getsid(0)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not folder.is_locked(), "it is gone")
    assert steps_of(tmp_path) == [1]


def test_where_no_process_can_be_started_the_trainer_flushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: FlushFolder) -> None:
        raise OSError("fork failed")

    monkeypatch.setattr(tiered_store, "start_detached", refuse)
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
    assert steps_of(tmp_path) == [1]
    assert "The detached flusher cannot be started, so the trainer flushes: fork failed" in caplog.text


@pytest.mark.parametrize("by", ["daemon", "trainer"])
def test_a_lasting_failure_is_raised_by_the_next_call_and_the_next_job_tries_again(
    by: Any, tmp_path: Path
) -> None:
    (tmp_path / "durable/step-1").mkdir(parents=True)
    notes = tmp_path / "durable/step-1/notes.txt"
    notes.write_text("not a checkpoint")
    manager = manager_of(tmp_path, flush=Flush(by=by))
    manager.save(1, state_of(1))
    with pytest.raises(RankFailed, match=r"making durable step 1 in the background.*notes\.txt"):
        manager.close()
    # A job of its own restores, whatever becomes of the old flush.
    with manager_of(tmp_path, flush=Flush(by=by)) as manager:
        assert manager.restore(state := state_of(0)) == 1
        notes.unlink()
    assert torch.equal(state["b"], state_of(1)["b"])
    assert steps_of(tmp_path) == [1]


def test_a_foreground_save_fails_if_its_step_cannot_become_durable(tmp_path: Path) -> None:
    (tmp_path / "durable/step-1").mkdir(parents=True)
    (tmp_path / "durable/step-1/notes.txt").write_text("not a checkpoint")
    manager = manager_of(tmp_path, flush=Flush(by="trainer", background=False))
    with pytest.raises(StorageError, match=r"Step 1 is cached, but not durable.*notes\.txt"):
        manager.save(1, state_of(1))
    manager.close()


@pytest.mark.parametrize("by", ["daemon", "trainer"])
def test_a_flush_keeps_below_its_bandwidth(by: Any, tmp_path: Path) -> None:
    rate, size_bytes = 16 << 20, 24 << 20
    state = {"weight": torch.ones(size_bytes // 8), "bias": torch.ones(size_bytes // 8)}
    with manager_of(tmp_path, flush=Flush(by=by, bandwidth=rate)) as manager:
        manager.save(1, state)
        folder, rates = FlushFolder(tmp_path / "cache"), []
        while folder.notes():
            rates.append(folder.progress().bytes_per_s)
            threading.Event().wait(0.02)
    assert steps_of(tmp_path) == [1]
    # What may pass without waiting: half a second of unused time, and a block of each thread.
    assert 0 < max(rates[len(rates) // 2 :]) <= 2 * rate


def test_an_open_storage_is_flushed_by_the_trainer_which_logs_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    durable = open_here("mem://where-no-daemon-can-write")
    with Manager(durable, cache=tmp_path / "cache", flush=Flush(by="daemon")) as manager:
        manager.save(1, state_of(1))
    assert "Flushing in the trainer instead of a daemon: the durable level was given" in caplog.text
    assert manager.steps() == [1]
    assert daemons_below(tmp_path) == []


def save_two(rank: int, root: Path, nodes: list[int], first: int, by: Any) -> list[int]:
    node = f"node-{nodes[rank]}"
    with Manager(
        root / "durable",
        cache=root / node,
        failure_domain=node,
        redundancy=Xor(),
        flush=by and Flush(by=by),
        keep_cached=None,
        timeout_s=60,
    ) as manager:
        for step in (first, first + 1):
            manager.save(step, {f"rank_{rank}": torch.full((5000,), rank + step)})
    return manager.steps()


@pytest.mark.parametrize("by", ["daemon", "trainer"])
def test_a_job_on_fewer_nodes_flushes_what_an_earlier_one_left_on_more(by: Any, tmp_path: Path) -> None:
    on_gloo_ranks(3, save_two, tmp_path, [0, 1, 2], 1, None)
    # A kill left the notes on some nodes only; then a node is lost, too.
    for step, node in ((1, "node-0"), (2, "node-2")):
        note(tmp_path, step, node)
    shutil.rmtree(tmp_path / "node-1")
    on_gloo_ranks(2, save_two, tmp_path, [2, 0], 3, by)
    wait_until(lambda: steps_of(tmp_path) == [1, 2, 3, 4], "all steps are durable by two nodes")
    for step in (1, 2, 3, 4):
        assert verify(tmp_path / f"durable/step-{step}").is_whole
    hidden = [path.name for path in (tmp_path / "durable").iterdir() if path.name.startswith(".")]
    assert hidden == []
