"""Gates on ranks that are threads, with real storage."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.rank_threads import ThreadComm, on_ranks
from tests.unit.cluster.facts.known_hosts import machine

from penstock.cluster.gates.gate_model import Gate, GateFinding, GateVerdict, PreflightRequest
from penstock.cluster.gates.preflight import (
    PreflightResult,
    check_shared_storage,
    measure_clock_offsets,
    run_preflight,
)
from penstock.errors import AccessRefused
from penstock.storage import Storage, open_storage
from penstock.storage.in_memory import MemorySink, MemoryStorage
from penstock.storage.protocol import write_object


def _undertaking(data: Path, results: Path | None = None, *, root: Path = Path("/")) -> PreflightRequest:
    uri = f"file://{data}"
    return PreflightRequest(
        environment={},
        uri=uri,
        reopen=partial(open_storage, uri, {}),
        results=results,
        root=root,
    )


def _findings(seen: PreflightResult) -> dict[Gate, GateFinding]:
    return {each.gate: each for each in seen.preflight.findings}


@pytest.mark.parametrize("size", [1, 3])
def test_all_gates_find_the_same_on_all_ranks(tmp_path: Path, size: int) -> None:
    (tmp_path / "data").mkdir()
    doing = _undertaking(tmp_path / "data", tmp_path / "results")
    first, *others = on_ranks(size, lambda comm: run_preflight(doing, comm), hosts=["one"] * size)
    assert all(other == first for other in others)
    found = _findings(first)
    assert list(found) == list(Gate)
    assert found[Gate.APART].verdict is GateVerdict.FAIL
    for gate in (Gate.CLUSTER, Gate.VERSIONS, Gate.SPACE, Gate.STORAGE, Gate.CLOCK):
        assert found[gate].verdict is GateVerdict.PASS, found[gate]
    assert first.preflight.cluster == "whole"
    assert first.cluster is not None
    assert first.cluster.via == "ranks"
    assert list((tmp_path / "data").iterdir()) == []
    assert not (tmp_path / "results").exists()


def test_gates_can_be_selected_and_skipped_which_is_recorded() -> None:
    def look(comm: ThreadComm) -> PreflightResult:
        return run_preflight(
            PreflightRequest(environment={}),
            comm,
            gates=(Gate.CLOCK, Gate.SPACE, Gate.IPC),
            skips=(Gate.IPC,),
        )

    (seen,) = on_ranks(1, look)
    verdicts = {gate: each.verdict for gate, each in _findings(seen).items()}
    assert verdicts == {
        Gate.CLOCK: GateVerdict.PASS,
        Gate.IPC: GateVerdict.SKIPPED,
        Gate.SPACE: GateVerdict.NOT_APPLICABLE,
    }
    assert seen.preflight.skipped == (Gate.IPC,)
    assert seen.preflight.cluster == "unknown"
    assert seen.cluster is None


def test_unknown_memory_leaves_the_cluster_gate_unchecked_and_stops_a_strict_run(
    tmp_path: Path,
) -> None:
    sound, broken = machine(tmp_path / "a"), machine(tmp_path / "b")
    (broken / "proc/meminfo").unlink()

    def look(comm: ThreadComm) -> PreflightResult:
        doing = PreflightRequest(environment={}, root=broken if comm.rank else sound)
        return run_preflight(doing, comm, gates=(Gate.CLUSTER,), is_strict=True)

    for seen in on_ranks(2, look):
        assert _findings(seen)[Gate.CLUSTER].verdict is GateVerdict.NOT_CHECKED
        assert seen.preflight.is_stopped


def _sights(size: int, reopen: Callable[[int], Storage], uri: str = "mem://x") -> list[GateFinding]:
    def look(comm: ThreadComm) -> GateFinding:
        return check_shared_storage(comm, uri, lambda: reopen(comm.rank), patience_s=0.0)

    return on_ranks(size, look)


def test_ranks_with_storages_of_their_own_are_found_out() -> None:
    shared, other = MemoryStorage(), MemoryStorage()
    for found in _sights(3, lambda rank: other if rank == 2 else shared):
        assert found.verdict is GateVerdict.FAIL
        assert "rank 2 on thread-2" in found.found
    assert list(shared.list()) == []


def test_where_nothing_can_be_written_what_lies_there_is_compared() -> None:
    class ReadOnly(MemoryStorage):
        locked = False

        def create(self, key: str, size_bytes: int | None = None) -> MemorySink:
            if self.locked:
                raise AccessRefused("read-only", uri=self.uri)
            return super().create(key, size_bytes)

    shared = ReadOnly()
    shared.locked = True
    (nothing, _) = _sights(2, lambda _rank: shared)
    assert nothing.verdict is GateVerdict.NOT_CHECKED
    assert "it is empty" in nothing.found
    shared.locked = False
    write_object(shared, "a", [b"bytes"])
    shared.locked = True
    (found, _) = _sights(2, lambda _rank: shared)
    assert found.verdict is GateVerdict.WARNING


def test_a_missing_folder_is_probed_in_its_parent_and_not_created(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/not/there"
    (found,) = _sights(1, lambda _rank: open_storage(uri, {}), uri)
    assert found.verdict is GateVerdict.PASS
    assert list(tmp_path.iterdir()) == []


def test_a_clock_that_is_ahead_is_measured_through_the_ranks_own_messages() -> None:
    import time

    def look(comm: ThreadComm) -> list[tuple[float, float]]:
        ahead_s = 3600.0 * comm.rank
        return measure_clock_offsets(comm, wall_s=lambda: time.time() + ahead_s)

    for offsets in on_ranks(3, look):
        for rank, (low_s, high_s) in enumerate(offsets):
            assert low_s <= 3600.0 * rank <= high_s
