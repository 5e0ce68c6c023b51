"""Node-local caches of eight ranks on four hosts: what survives the loss of which, bit for bit."""

import errno
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from tests.support.bytes_engine import BytesEngine
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.checkpoint.commit.protocol import Draft
from penstock.checkpoint.engine import LoadChoice, SaveChoice
from penstock.checkpoint.levels import cache
from penstock.checkpoint.levels.cache import CacheLevel, NodeCache
from penstock.checkpoint.levels.options import DoubleParity, Partner, Scheme, Single, Xor
from penstock.checkpoint.levels.redundancy import Assessment
from penstock.errors import OutOfSpace, PenstockError, RankFailed, UsageError
from penstock.storage import Storage, open_storage
from penstock.storage.protocol import Source, WrappedStorage

Result = TypeVar("Result")

RANKS, HOSTS = 8, 4
NAMES = [f"host-{rank // 2}" for rank in range(RANKS)]
SIZES = [100_000, 0, 70_001, 5, 131_072, 4096, 99_999, 12_345]
BLOCK_BYTES = 16_384


def _content(rank: int, step: int) -> bytearray:
    return bytearray(np.random.default_rng([rank, step]).bytes(SIZES[rank]))


def _level(comm: ThreadComm, folder: Path, schemes: list[Scheme]) -> CacheLevel:
    storage = open_storage(str(folder / NAMES[comm.rank]), {})
    return CacheLevel(storage, comm, schemes=schemes, block_bytes=BLOCK_BYTES)


def _save(comm: ThreadComm, folder: Path, schemes: list[Scheme], step: int = 1) -> None:
    engine = BytesEngine()
    prepared = engine.prepare({"bytes": _content(comm.rank, step)}, comm, SaveChoice())
    level = _level(comm, folder, schemes)
    facts = {"step": step}
    level.complete(level.start(f"step-{step}"), prepared, prepared.stage(), number=step, facts=facts)


def _recover(comm: ThreadComm, folder: Path, schemes: list[Scheme], step: int = 1) -> tuple[Assessment, bool]:
    """What was found, and whether this rank's bytes are right after the repair."""
    level = _level(comm, folder, schemes)
    found = level.assess(f"step-{step}")
    if found.is_rebuildable:
        level.repair(f"step-{step}", found)
        assert not level.assess(f"step-{step}").lost
    if found.reason:
        return found, False
    state = {"bytes": bytearray(SIZES[comm.rank])}
    BytesEngine().load(state, level.node.find(f"step-{step}"), comm, LoadChoice(), None)
    return found, state["bytes"] == _content(comm.rank, step)


def _run(program: Callable[[ThreadComm], Result]) -> list[Result]:
    return on_ranks(RANKS, program, hosts=NAMES)


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("scheme", "losses"),
    [(Partner(group=4), 1), (Xor(group=4), 1), (Xor(group=2), 1), (DoubleParity(group=4), 2)],
    ids=["partner", "xor of 4", "xor of 2", "double parity"],
)
def test_whichever_hosts_are_lost_their_caches_come_back_bit_for_bit(
    scheme: Scheme, losses: int, tmp_path: Path
) -> None:
    _run(lambda comm: _save(comm, tmp_path, [scheme]))
    before = _tree(tmp_path)
    assert not any(".penstock-" in name for name in before), "no drafts and leases stay"
    for lost in combinations(range(HOSTS), losses):
        for host in lost:
            shutil.rmtree(tmp_path / f"host-{host}")
        for found, is_right in _run(lambda comm: _recover(comm, tmp_path, [scheme])):
            assert found.lost == tuple(rank for rank in range(RANKS) if rank // 2 in lost)
            assert is_right
        assert _tree(tmp_path) == before


def test_a_share_whose_cache_is_full_is_rebuilt_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheme = DoubleParity(group=4)
    _run(lambda comm: _save(comm, tmp_path, [scheme]))
    lost = (tmp_path / "host-1/step-1/__2_0.distcp").read_bytes()
    shutil.rmtree(tmp_path / "host-1")
    room = {"host-0": 600_000, "host-1": 100_000, "host-2": 5_000_000, "host-3": 600_000}
    monkeypatch.setattr(cache, "find_room", lambda folder: room[folder.name])

    def repair(comm: ThreadComm) -> Assessment:
        level = _level(comm, tmp_path, [scheme])
        level.repair("step-1", level.assess("step-1"))
        return level.assess("step-1")

    found = _run(repair)[0]
    assert not found.lost
    assert (found.holders[2], found.holders[3]) == (4, 3), "what is small enough stays at home"
    assert (tmp_path / "host-2/step-1/__2_0.distcp").read_bytes() == lost
    assert (
        "the cache of rank 2 is full, so the files of rank 2 are rebuilt in the cache of rank 4"
        in caplog.text
    )


class CountedReads(WrappedStorage):
    """A storage that notes what is opened for reading."""

    def __init__(self, inside: Storage) -> None:
        super().__init__(inside)
        self.opened: list[str] = []

    def open(self, key: str) -> Source:
        self.opened.append(key)
        return super().open(key)


@pytest.mark.parametrize("scheme", [Partner(), Xor(group=4), DoubleParity(group=4)], ids=str)
def test_parity_is_computed_without_opening_a_file_of_the_save(scheme: Scheme, tmp_path: Path) -> None:
    def save(comm: ThreadComm) -> list[str]:
        storage = CountedReads(open_storage(str(tmp_path / NAMES[comm.rank]), {}))
        level = CacheLevel(storage, comm, schemes=[scheme], block_bytes=BLOCK_BYTES)
        prepared = BytesEngine().prepare({"bytes": _content(comm.rank, 1)}, comm, SaveChoice())
        level.complete(level.start("step-1"), prepared, prepared.stage(), number=1, facts={"step": 1})
        return storage.opened

    assert _run(save) == [[]] * RANKS
    shutil.rmtree(tmp_path / "host-1")
    assert all(is_right for _, is_right in _run(lambda comm: _recover(comm, tmp_path, [scheme])))


@pytest.mark.parametrize(
    ("scheme", "hosts", "told"),
    [
        (Single(), [1], "no record of the share of rank 2"),
        (Xor(group=4), [0, 3], "xor survives 1 loss"),
        (Partner(group=4), [1, 2], "partner survives 1 loss"),
        (DoubleParity(group=4), [0, 1, 2], "double-parity survives 2 losses"),
    ],
)
def test_one_loss_too_many_is_reported_and_nothing_is_rebuilt(
    scheme: Scheme, hosts: list[int], told: str, tmp_path: Path
) -> None:
    _run(lambda comm: _save(comm, tmp_path, [scheme]))
    for host in hosts:
        shutil.rmtree(tmp_path / f"host-{host}")
    for found, _ in _run(lambda comm: _recover(comm, tmp_path, [scheme])):
        assert told in found.reason


def test_copies_survive_two_losses_that_are_not_neighbours(tmp_path: Path) -> None:
    scheme = Partner(group=4)
    _run(lambda comm: _save(comm, tmp_path, [scheme]))
    for host in (0, 2):
        shutil.rmtree(tmp_path / f"host-{host}")
    for found, is_right in _run(lambda comm: _recover(comm, tmp_path, [scheme])):
        assert found.lost == (0, 1, 4, 5)
        assert is_right


def test_a_file_that_is_missing_or_short_costs_its_rank_and_comes_back(tmp_path: Path) -> None:
    scheme = Xor(group=4)
    _run(lambda comm: _save(comm, tmp_path, [scheme]))
    before = _tree(tmp_path)
    (tmp_path / "host-2/step-1/__4_0.distcp").unlink()
    results = _run(lambda comm: _recover(comm, tmp_path, [scheme]))
    assert all(found.lost == (4,) and is_right for found, is_right in results)
    with (tmp_path / "host-0/step-1/parity-1.bin").open("r+b") as parity:
        parity.truncate(10)
    results = _run(lambda comm: _recover(comm, tmp_path, [scheme]))
    assert all(found.lost == (1,) and is_right for found, is_right in results)
    assert _tree(tmp_path) == before


def test_a_rebuild_takes_the_manifest_from_a_node_that_has_it_undamaged(tmp_path: Path) -> None:
    scheme = Xor(group=4)
    _run(lambda comm: _save(comm, tmp_path, [scheme]))
    original = (tmp_path / "host-3/step-1/penstock.json").read_bytes()
    shutil.rmtree(tmp_path / "host-3")
    (tmp_path / "host-0/step-1/penstock.json").unlink()
    damaged = tmp_path / "host-1/step-1/penstock.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"step", b"stop"))

    def repair(comm: ThreadComm) -> None:
        level = _level(comm, tmp_path, [scheme])
        level.repair("step-1", level.assess("step-1"))

    _run(repair)
    assert (tmp_path / "host-3/step-1/penstock.json").read_bytes() == original


def test_each_step_has_the_scheme_of_its_interval(tmp_path: Path) -> None:
    schemes: list[Scheme] = [Single(every=1), Xor(group=4, every=2)]

    def save_both(comm: ThreadComm) -> None:
        for step in (1, 2):
            _save(comm, tmp_path, schemes, step)

    _run(save_both)
    shutil.rmtree(tmp_path / "host-3")
    for step, is_restorable in ((1, False), (2, True)):
        for found, is_right in _run(partial(_recover, folder=tmp_path, schemes=schemes, step=step)):
            assert (found.reason == "") is is_restorable
            assert is_right is is_restorable
    names = _run(lambda comm: _level(comm, tmp_path, schemes).names())
    assert names == [["step-1", "step-2"]] * RANKS


def test_a_node_that_cannot_begin_leaves_no_node_with_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = NodeCache.start

    def start_unless_full(node: NodeCache, draft: Draft) -> None:
        if node.ranks[0] == 4:
            raise OutOfSpace("The disk is full", uri="file:///full", errno=errno.ENOSPC)
        start(node, draft)

    monkeypatch.setattr(NodeCache, "start", start_unless_full)

    def begin(comm: ThreadComm) -> bool:
        level = _level(comm, tmp_path, [Xor(group=4)])
        with pytest.raises(RankFailed, match="The disk is full"):
            level.start("step-1")
        return True

    _run(begin)
    assert not list(tmp_path.rglob(".penstock-save*"))


def test_a_node_that_cannot_commit_leaves_no_node_with_the_step(tmp_path: Path) -> None:
    def save_badly(comm: ThreadComm) -> str:
        engine = BytesEngine(spoil=_refuse if comm.rank == 5 else None)
        prepared = engine.prepare({"bytes": _content(comm.rank, 1)}, comm, SaveChoice())
        level = _level(comm, tmp_path, [Xor(group=4)])
        try:
            level.complete(level.start("step-1"), prepared, prepared.stage(), number=1, facts={"step": 1})
        except PenstockError as error:
            return f"{type(error).__name__}: {error}"
        return "saved"

    for told in _run(save_badly):
        assert "Rank 5 on host-2 failed" in str(told)
    assert _tree(tmp_path) == {}


def _names(comm: ThreadComm, folder: Path) -> list[str]:
    return _level(comm, folder, [Xor(group=4)]).names()


def _doubt(folder: Path, *hosts: int) -> None:
    """As a crash leaves it that came before all nodes had committed the step."""
    for host in hosts:
        (folder / f"host-{host}/.penstock-doubt-step-1").write_bytes(b"a save")


def test_a_step_committed_on_too_few_nodes_is_removed(tmp_path: Path) -> None:
    _run(lambda comm: _save(comm, tmp_path, [Xor(group=4)]))
    _doubt(tmp_path, 1, 2)
    for host in (0, 3):
        shutil.rmtree(tmp_path / f"host-{host}")
    assert _run(partial(_names, folder=tmp_path)) == [[]] * RANKS
    assert _tree(tmp_path) == {}


def test_an_unconfirmed_step_that_can_be_restored_counts(tmp_path: Path) -> None:
    _run(lambda comm: _save(comm, tmp_path, [Xor(group=4)]))
    before = _tree(tmp_path)
    _doubt(tmp_path, 0, 1, 2, 3)
    assert _run(partial(_names, folder=tmp_path)) == [["step-1"]] * RANKS
    assert _tree(tmp_path) == before


def test_a_lost_step_that_one_node_knows_to_be_committed_is_not_forgotten(tmp_path: Path) -> None:
    _run(lambda comm: _save(comm, tmp_path, [Xor(group=4)]))
    _doubt(tmp_path, 1)
    for host in (0, 3):
        shutil.rmtree(tmp_path / f"host-{host}")
    assert _run(partial(_names, folder=tmp_path)) == [["step-1"]] * RANKS


@pytest.mark.slow
def test_under_mpi_two_lost_hosts_come_back(tmp_path: Path) -> None:
    program = ("-m", "tests.integration.checkpoint.levels.programs.mpi_caches")
    root = Path(__file__).parents[4]
    mpiexec = Path(sys.executable).parent / "mpiexec"
    command = [str(mpiexec), "-n", str(RANKS), sys.executable, *program, str(tmp_path)]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("is right") == RANKS


def _refuse() -> None:
    raise OSError(28, "No space left on device")


def test_ranks_of_one_host_that_must_protect_each_other_are_refused(tmp_path: Path) -> None:
    def make(comm: ThreadComm) -> None:
        CacheLevel(open_storage(str(tmp_path), {}), comm, schemes=[Xor(group=2, strict=True)], domain="one")

    with pytest.raises((UsageError, RankFailed), match="failure domains"):
        on_ranks(2, make)


def test_a_cache_that_is_not_a_folder_is_refused() -> None:
    with pytest.raises(UsageError, match="A cache must be a local folder"):
        on_ranks(1, lambda comm: CacheLevel(open_storage("mem://cache", {}), comm, schemes=[Single()]))
