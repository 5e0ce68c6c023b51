"""What a daemon does for its orders, told by its journal and the disks; it runs in this process."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.flush_daemons import wait_until
from tests.support.flush_orders import files_of, order, serve
from tests.support.gloo_ranks import on_gloo_ranks

from penstock.checkpoint.commit.shared_draft import MarkProgress, SharedDraft
from penstock.checkpoint.levels.flush.daemon import Daemon
from penstock.checkpoint.levels.flush.daemon_client import read_flush_states
from penstock.checkpoint.levels.flush.flush_folder import FlushFolder, JournalReader, SaveState, parse_entries
from penstock.checkpoint.manager.manager import Manager
from penstock.checkpoint.tools.verify import verify
from penstock.errors import OutOfSpace
from penstock.storage.capabilities import prefer_direct_access
from penstock.storage.protocol import WrappedStorage
from penstock.storage.residency import count_by_mincore
from penstock.storage.uri import open_here

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.checkpoint.levels.flush.flusher import FlushState
    from penstock.storage import Storage
    from penstock.storage.protocol import Sink

NUM_ITEMS = 40_000


class Watched(WrappedStorage):
    """A storage that notes which objects are created, and refuses some."""

    def __init__(self, inside: Storage, created: list[str], refused: Callable[[str], bool]) -> None:
        super().__init__(inside)
        self._created = created
        self._refused = refused

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        name = key.rpartition("/")[2]
        if self._refused(name):
            raise OutOfSpace("No space is left", uri=f"{self.uri}/{key}")
        self._created.append(name)
        return super().create(key, size_bytes)

    def past_cache(self, reads: str | None = None) -> Watched:
        return Watched(prefer_direct_access(open_here(self.uri), reads=reads), self._created, self._refused)


class Opener:
    """Opens storages as the daemon does, with a watch on the durable level."""

    def __init__(self, refused: Callable[[str], bool] = lambda _: False) -> None:
        self.created: list[str] = []
        self.refused = refused

    def __call__(self, path: str) -> Storage:
        storage = open_here(path)
        return Watched(storage, self.created, self.refused) if "durable" in path else storage

    def data_files(self) -> list[str]:
        return [name for name in self.created if name.endswith(".distcp")]


def state_of(step: int) -> dict[str, Any]:
    return {"a": torch.full((NUM_ITEMS,), float(step)), "b": torch.arange(NUM_ITEMS) + step}


def save_cached(root: Path, *steps: int) -> None:
    with Manager(root / "durable", cache=root / "cache", flush=None, keep_cached=None) as manager:
        for step in steps:
            manager.save(step, state_of(step))


def standing(folder: FlushFolder, step: int) -> SaveState:
    found = JournalReader(folder.journal).states()
    return next(each for each in reversed(found.values()) if each.step == step)


def outcome(folder: FlushFolder, step: int) -> str:
    line = standing(folder, step).outcome
    return line.what if line else "open"


def state(folder: FlushFolder, step: int) -> FlushState:
    return read_flush_states(folder, JournalReader(folder.journal))[step]


def durable(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "durable").iterdir())


def test_a_draft_that_another_node_has_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_cached(tmp_path, 1)
    mark, removed = SharedDraft.mark, list[str]()

    def mark_after_removal(draft: SharedDraft, progress: MarkProgress) -> None:
        # As a node does that knows already that the step is superseded.
        if progress == "done" and not removed:
            removed.append(progress)
            draft.clear_up()
        mark(draft, progress)

    monkeypatch.setattr(SharedDraft, "mark", mark_after_removal)
    folder = order(tmp_path, 1)
    serve(folder)
    assert removed
    serve(folder)
    assert [entry.what for entry in parse_entries(folder.journal.read_bytes())].count("failed") == 0
    assert verify(f"{tmp_path}/durable/step-1").is_whole


def test_durable_files_are_not_copied_again_after_a_full_disk(tmp_path: Path) -> None:
    save_cached(tmp_path, 1)
    folder = order(tmp_path, 1)
    first, second = (file.name for file in files_of(folder.cache, 1))
    full = Opener(refused=lambda name: name == second)
    serve(folder, full)
    assert full.data_files() == [first]
    assert state(folder, 1).phase == "failing"
    assert "No space is left" in state(folder, 1).reason
    again = Opener()
    serve(folder, again)
    assert again.data_files() == [second]
    assert outcome(folder, 1) == "durable"
    assert verify(str(tmp_path / "durable/step-1")).is_whole


def test_files_that_changed_in_the_draft_are_copied_again(tmp_path: Path) -> None:
    save_cached(tmp_path, 1)
    folder = order(tmp_path, 1)
    first, second = (file.name for file in files_of(folder.cache, 1))
    serve(folder, Opener(refused=lambda name: name == second))
    (draft,) = (tmp_path / "durable").glob(".penstock-save-*-step-1")
    content = bytearray((draft / first).read_bytes())
    content[100] ^= 1
    (draft / first).write_bytes(content)
    again = Opener()
    serve(folder, again)
    assert again.data_files() == [first, second]
    assert verify(str(tmp_path / "durable/step-1")).is_whole


def test_bytes_that_are_damaged_in_the_cache_are_never_committed_as_if_they_were_right(
    tmp_path: Path,
) -> None:
    save_cached(tmp_path, 1)
    folder = order(tmp_path, 1)
    victim = folder.cache / "step-1" / files_of(folder.cache, 1)[0].name
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    serve(folder)
    failure = standing(folder, 1).failure
    assert failure is not None
    assert failure.is_lasting
    assert "is damaged in the cache" in failure.reason
    assert not [name for name in durable(tmp_path) if name.startswith("step")]
    # Mended, as a restore would, it is flushed.
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    serve(folder)
    assert outcome(folder, 1) == "durable"


def test_the_newest_comes_first_and_what_retention_would_remove_at_once_is_dropped(tmp_path: Path) -> None:
    save_cached(tmp_path, 1, 2, 3)
    for step in (1, 2, 3):
        folder = order(tmp_path, step, keep=2)
    opener = Opener()
    serve(folder, opener)
    assert [outcome(folder, step) for step in (1, 2, 3)] == ["superseded", "durable", "durable"]
    assert durable(tmp_path) == ["latest", "step-2", "step-3"]
    assert len(opener.data_files()) == 4, "nothing of step 1 was copied"
    assert "3, 2 are durable" in state(folder, 1).reason


def test_a_run_that_begins_anew_is_flushed_beside_the_newer_steps_of_another(tmp_path: Path) -> None:
    save_cached(tmp_path, 1, 8, 9)
    for step in (8, 9):
        folder = order(tmp_path, step, keep=2)
    serve(folder)
    folder = order(tmp_path, 1, keep=2)
    serve(folder)
    assert outcome(folder, 1) == "durable"
    assert durable(tmp_path) == ["latest", "step-1", "step-8", "step-9"]


def test_a_newer_step_that_comes_meanwhile_is_copied_before_the_rest_of_an_older_one(tmp_path: Path) -> None:
    save_cached(tmp_path, 1, 2)
    folder = order(tmp_path, 1)

    def comes(name: str) -> bool:
        if name.endswith(".distcp") and not opener.data_files():
            order(tmp_path, 2)
        return False

    opener = Opener(refused=comes)
    serve(folder, opener, patience_s=1e9)
    copied = [
        line for line in parse_entries(folder.journal.read_bytes()) if line.what in ("copied", "durable")
    ]
    assert [(line.what, line.step) for line in copied][:4] == [
        ("copied", 1),
        ("copied", 2),
        ("copied", 2),
        ("durable", 2),
    ]
    assert [outcome(folder, step) for step in (1, 2)] == ["durable", "durable"]
    assert len(opener.data_files()) == 4, "nothing was copied twice"


def test_a_step_that_was_saved_anew_without_a_flush_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    save_cached(tmp_path, 1)
    folder = order(tmp_path, 1)
    save_cached(tmp_path, 1)
    serve(folder)
    assert outcome(folder, 1) == "replaced"
    assert folder.orders.steps() == []
    order(tmp_path, 1)
    serve(folder)
    assert outcome(folder, 1) == "durable"


def test_an_older_durable_step_of_the_name_is_replaced(tmp_path: Path) -> None:
    save_cached(tmp_path, 1)
    serve(order(tmp_path, 1))
    before = (tmp_path / "durable/step-1/penstock.json").read_bytes()
    save_cached(tmp_path, 1)
    folder = order(tmp_path, 1)
    serve(folder)
    after = (tmp_path / "durable/step-1/penstock.json").read_bytes()
    assert before != after
    assert after == (folder.cache / "step-1/penstock.json").read_bytes()
    assert durable(tmp_path) == ["latest", "step-1"]


def save_on_two(rank: int, root: Path) -> None:
    with Manager(
        root / "durable", cache=root / f"node-{rank}", flush=None, failure_domain=str(rank), timeout_s=60
    ) as manager:
        manager.save(1, {f"rank_{rank}": torch.full((5000,), rank), "shared": torch.arange(5000)})


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step in the caches of two nodes."""
    root = tmp_path_factory.mktemp("two-nodes")
    on_gloo_ranks(2, save_on_two, root)
    return root


def both(root: Path, two_nodes: Path) -> tuple[FlushFolder, FlushFolder]:
    """The same step, ordered on both."""
    for name in ("node-0", "node-1"):
        shutil.copytree(two_nodes / name, root / name)
    first = order(root, 1, "node-0", "node-1", node=0)
    return first, order(root, 1, "node-0", "node-1", node=1)


def test_nodes_copy_their_own_files_and_the_first_publishes(tmp_path: Path, two_nodes: Path) -> None:
    first, second = both(tmp_path, two_nodes)
    opener = Opener()
    serve(second, opener)
    assert opener.data_files() == [file.name for file in files_of(second.cache, 1)]
    assert state(second, 1).phase == "waiting"
    assert not list((tmp_path / "durable").glob("step-*"))
    serve(first)
    assert outcome(first, 1) == "durable"
    assert verify(str(tmp_path / "durable/step-1")).is_whole
    serve(second)
    assert outcome(second, 1) == "durable"
    assert durable(tmp_path) == ["latest", "step-1"]


def test_another_node_publishes_if_the_first_does_not(tmp_path: Path, two_nodes: Path) -> None:
    first, second = both(tmp_path, two_nodes)
    serve(second)
    # The first node dies between its last copy and the commit: all is marked, and nobody publishes.
    with first.locked() as held, pytest.raises(KeyboardInterrupt):
        Daemon(first, held, open_storage=Opener(refused=_interrupts)).run()
    assert state(first, 1).phase == "waiting"
    begun_s = time.time()
    serve(second, clock=lambda: begun_s + 200 * (time.time() - begun_s), patience_s=1e9)
    assert outcome(second, 1) == "durable"
    assert verify(str(tmp_path / "durable/step-1")).is_whole
    serve(first)
    assert outcome(first, 1) == "durable"


def _interrupts(name: str) -> bool:
    if name == "penstock.json":
        raise KeyboardInterrupt
    return False


def test_a_removed_draft_is_copied_again_by_all_nodes(tmp_path: Path, two_nodes: Path) -> None:
    first, second = both(tmp_path, two_nodes)
    serve(second)
    (draft,) = (tmp_path / "durable").glob(".penstock-save-*-step-1")
    shutil.rmtree(draft)
    # The first node finds files missing, and takes back the mark of the second.
    serve(first)
    assert state(first, 1).phase == "failing"
    for _ in range(2):
        serve(second)
    serve(first)
    assert outcome(first, 1) == "durable"
    assert verify(str(tmp_path / "durable/step-1")).is_whole


def test_it_pauses_while_a_living_trainer_saves_and_not_for_a_dead_one(tmp_path: Path) -> None:
    save_cached(tmp_path, 1)
    folder = order(tmp_path, 1, pause_while_saving=True)
    note = folder.saving.put()
    note.write_bytes(note.read_bytes().replace(b'"started": "', b'"started": "9'))
    with folder.saving.present():
        daemon = threading.Thread(target=serve, args=(folder,), kwargs={"patience_s": 1e9})
        daemon.start()
        wait_until(lambda: (speed := folder.progress()) is not None and speed.is_paused, "it pauses")
        speed = folder.progress()
        assert speed is not None
        assert speed.moved_bytes == 0
    daemon.join()
    assert outcome(folder, 1) == "durable"


def test_pending_steps_are_flushed_once_the_durable_level_is_back(tmp_path: Path) -> None:
    save_cached(tmp_path, 1)
    (tmp_path / "durable").write_text("not mounted")
    folder = order(tmp_path, 1)
    serve(folder)
    assert state(folder, 1).phase == "failing"
    (tmp_path / "durable").unlink()
    serve(folder)
    assert outcome(folder, 1) == "durable"


def test_an_unreadable_order_does_not_affect_others(tmp_path: Path) -> None:
    save_cached(tmp_path, 1)
    folder = order(tmp_path, 1)
    whole = json.loads((folder.path / "orders/step-1.json").read_bytes())
    (folder.path / "orders/step-7.json").write_text(json.dumps({**whole, "stop": 3}))
    serve(folder)
    assert outcome(folder, 1) == "durable"
    assert state(folder, 7).phase == "failing"
    assert "stop" in state(folder, 7).reason


def test_it_ends_when_its_cache_is_removed(tmp_path: Path) -> None:
    folder = FlushFolder(tmp_path / "cache")
    daemon = threading.Thread(target=serve, args=(folder,), kwargs={"linger_s": 1e9})
    daemon.start()
    wait_until(folder.daemon_is_running, "it holds the lock")
    (tmp_path / "cache").rename(tmp_path / "removed")
    daemon.join(60)
    assert not daemon.is_alive()


def resident_pages(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return count_by_mincore(descriptor, path.stat().st_size).resident
    finally:
        os.close(descriptor)


def test_reading_the_cache_leaves_the_page_cache_as_it_was(tmp_path: Path) -> None:
    if "direct" not in prefer_direct_access(open_here(str(tmp_path))).uri:
        pytest.skip("this file system has no O_DIRECT")
    save_cached(tmp_path, 1)
    files = list((tmp_path / "cache/step-1").glob("*.distcp"))
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    before = [resident_pages(path) for path in files]
    folder = order(tmp_path, 1)
    serve(folder)
    assert outcome(folder, 1) == "durable"
    assert [resident_pages(path) for path in files] == before
    # Nor does what was written stay in memory that training could use.
    assert sum(resident_pages(path) for path in (tmp_path / "durable/step-1").glob("*.distcp")) <= len(files)
