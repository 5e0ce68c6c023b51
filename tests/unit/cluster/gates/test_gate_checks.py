"""From reports of ranks to findings: each gate passes good values and names bad ones."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cluster.facts.known_hosts import cluster, present

from penstock.cluster.facts.host_facts import AbsentHost, ClusterFacts
from penstock.cluster.gates.gate_checks import (
    check_apart,
    check_clock,
    check_cluster,
    check_ipc,
    check_limits,
    check_space,
    check_storage,
    check_versions,
    format_ranks,
)
from penstock.cluster.gates.gate_model import (
    Gate,
    GateFinding,
    GateVerdict,
    Preflight,
    RankReport,
    Volume,
)
from penstock.cluster.gates.preflight import bound_offsets

GIB = 1 << 30
LIMITS = {"open files": 65536, "processes": None, "bytes of a file": None, "locked bytes": 8 << 20}


def volume(
    identity: str, *, device: int = 1, free_bytes: int = 100 * GIB, total_bytes: int = 200 * GIB
) -> Volume:
    return Volume(
        identity=identity,
        device=device,
        folder=f"/{identity}",
        total_bytes=total_bytes,
        free_bytes=free_bytes,
    )


def rank(number: int, **changed: object) -> RankReport:
    """A sound rank, two on each host, but for what is `changed`."""
    sound = RankReport(
        rank=number,
        host=f"node{number // 2}",
        versions={"Python": "3.11.7", "numpy": "2.1"},
        limits=LIMITS,
        shared_memory=volume("shm", total_bytes=4 * GIB, free_bytes=4 * GIB),
        target=volume("data", device=7),
        results=volume("home", device=8),
    )
    return replace(sound, **changed)  # type: ignore[arg-type]  # fields of the test's own choice


SOUND = [rank(number) for number in range(4)]


@pytest.mark.parametrize(
    "judge",
    [check_versions, check_limits, check_ipc, check_apart, check_space],
    ids=lambda judge: judge.__name__,
)
def test_sound_ranks_pass(judge: object) -> None:
    assert callable(judge)
    assert judge(SOUND).verdict is GateVerdict.PASS


def test_a_different_version_is_named_with_its_ranks() -> None:
    odd = rank(3, versions={"Python": "3.11.7", "numpy": "2.2"})
    missing = rank(2, versions={"Python": "3.11.7"})
    found = check_versions([rank(0), rank(1), missing, odd])
    assert found.verdict is GateVerdict.FAIL
    assert "numpy: 2.1 on ranks 0-1, none on rank 2, 2.2 on rank 3" in found.found
    assert "Python" not in found.found


@pytest.mark.parametrize(
    ("limit", "value", "verdict"),
    [
        ("open files", 1023, GateVerdict.FAIL),
        ("open files", 1024, GateVerdict.WARNING),
        ("open files", 4095, GateVerdict.WARNING),
        ("open files", 4096, GateVerdict.PASS),
        ("processes", 255, GateVerdict.FAIL),
        ("bytes of a file", GIB - 1, GateVerdict.FAIL),
        ("bytes of a file", GIB, GateVerdict.WARNING),
        ("locked bytes", 0, GateVerdict.PASS),
    ],
)
def test_limits_stop_where_they_are_too_low_and_warn_where_they_are_low(
    limit: str, value: int, verdict: GateVerdict
) -> None:
    found = check_limits([*SOUND[:3], rank(3, limits={**LIMITS, limit: value})])
    assert found.verdict is verdict
    assert ("node1" in found.found) == (verdict is not GateVerdict.PASS)


@pytest.mark.parametrize(
    ("memory", "verdict", "said"),
    [
        (None, GateVerdict.FAIL, "no /dev/shm on node1"),
        (volume("shm", total_bytes=4 * GIB, free_bytes=1 << 20), GateVerdict.FAIL, "1 MiB free"),
        (volume("shm", total_bytes=64 << 20, free_bytes=64 << 20), GateVerdict.WARNING, "64 MiB"),
        (volume("shm", total_bytes=GIB, free_bytes=64 << 20), GateVerdict.PASS, "enough shared memory"),
    ],
)
def test_shared_memory_must_be_there_and_free(memory: Volume | None, verdict: GateVerdict, said: str) -> None:
    found = check_ipc([*SOUND[:3], rank(3, shared_memory=memory)])
    assert found.verdict is verdict
    assert said in found.found


def test_results_beside_what_is_measured_are_refused_by_host() -> None:
    found = check_apart([*SOUND[:2], rank(2, results=volume("data", device=7))])
    assert found.verdict is GateVerdict.FAIL
    assert "node1" in found.found
    assert check_apart([rank(0, target=None)]).verdict is GateVerdict.PASS


@given(needs=st.lists(st.integers(0, 100), min_size=1, max_size=6), free=st.integers(0, 400))
def test_ranks_of_one_file_system_need_their_room_together(needs: list[int], free: int) -> None:
    ranks = [
        rank(number, target=volume("data", free_bytes=free * GIB), written_bytes=need * GIB, results=None)
        for number, need in enumerate(needs)
    ]
    fits = free * 20 >= sum(needs) * 21
    assert (check_space(ranks).verdict is GateVerdict.PASS) == fits


def test_results_need_a_little_room_too() -> None:
    full = volume("home", free_bytes=1 << 20)
    found = check_space([rank(0, results=full)])
    assert found.verdict is GateVerdict.FAIL
    assert "/home" in found.found


@pytest.mark.parametrize(
    ("pair", "verdict"),
    [
        ((-0.001, 0.002), GateVerdict.PASS),
        ((-1.0, 1.0), GateVerdict.PASS),
        ((1.01, 1.2), GateVerdict.FAIL),
        ((-9.0, -1.5), GateVerdict.FAIL),
        ((-0.2, 1.5), GateVerdict.NOT_CHECKED),
        ((0.5, 0.4), GateVerdict.NOT_CHECKED),
    ],
)
def test_a_clock_is_wrong_only_where_that_is_proven(pair: tuple[float, float], verdict: GateVerdict) -> None:
    assert check_clock(["a", "b", "c"], [(0.0, 0.0), (0.0, 0.001), pair]).verdict is verdict


@given(
    skews=st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=4),
    delays=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=5),
)
def test_bounds_always_hold_the_true_offset(skews: list[float], delays: list[tuple[float, float]]) -> None:
    offsets = [0.0, *skews]
    rounds = [
        (100.0, [100.0 + there + offset for offset in offsets], 100.0 + there + back)
        for there, back in delays
    ]
    for offset, (low_s, high_s) in zip(offsets, bound_offsets(rounds), strict=True):
        assert low_s - 1e-6 <= offset <= high_s + 1e-6
        assert high_s - low_s <= min(there + back for there, back in delays) + 1e-6


def _storage(*digests: str, is_fresh: bool = True) -> GateFinding:
    views = [
        (f"node{number}", digest, "" if digest else "it is not there")
        for number, digest in enumerate(digests)
    ]
    return check_storage("/data", "abc", views, is_fresh=is_fresh)


def test_storage_is_shared_where_every_rank_reads_the_same_bytes() -> None:
    assert _storage("abc", "abc").verdict is GateVerdict.PASS
    found = _storage("abc", "", "xyz")
    assert found.verdict is GateVerdict.FAIL
    assert "2 of 3 ranks" in found.found
    assert "rank 1 on node1: it is not there" in found.found
    assert "rank 2 on node2 reads other bytes" in found.found


def test_bytes_that_were_there_before_prove_less() -> None:
    assert _storage("abc", "abc", is_fresh=False).verdict is GateVerdict.WARNING
    assert _storage("abc", is_fresh=False).verdict is GateVerdict.PASS


def test_facts_of_some_hosts_are_not_checked_and_unlike_hosts_are_warned_of() -> None:
    assert check_cluster(cluster(present("a"), present("b"))).verdict is GateVerdict.PASS
    small = cluster(present("a"), present("b", memory_bytes=GIB))
    assert check_cluster(small).verdict is GateVerdict.WARNING
    unknown = cluster(present("a"), present("b", memory_bytes=None))
    assert check_cluster(unknown).verdict is GateVerdict.NOT_CHECKED
    absent = AbsentHost(host="b", reason="no response within 9 s", exit_code=None, stderr="")
    partial = ClusterFacts(
        via="ssh",
        collected_at="2026-01-02T03:04:05+00:00",
        asked=("a", "b"),
        is_partial=True,
        present=(present("a"),),
        absent=(absent,),
    )
    found = check_cluster(partial)
    assert found.verdict is GateVerdict.NOT_CHECKED
    assert "b: no response within 9 s" in found.found


@pytest.mark.parametrize("verdict", list(GateVerdict))
def test_only_failed_and_unchecked_gates_stop_and_only_strict_runs(verdict: GateVerdict) -> None:
    finding = GateFinding(gate=Gate.SPACE, verdict=verdict, found="x")
    stops = verdict in (GateVerdict.FAIL, GateVerdict.NOT_CHECKED)
    assert Preflight(is_strict=True, cluster="whole", findings=(finding,)).is_stopped == stops
    assert not Preflight(is_strict=False, cluster="whole", findings=(finding,)).is_stopped


@given(st.sets(st.integers(0, 30), min_size=1))
def test_formatted_ranks_are_complete(ranks: set[int]) -> None:
    _, _, text = format_ranks(ranks).partition(" ")
    again: set[int] = set()
    for part in text.split(", "):
        first, _, last = part.partition("-")
        again |= set(range(int(first), int(last or first) + 1))
    assert again == ranks
