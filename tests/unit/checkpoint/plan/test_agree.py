"""How ranks agree on one plan, and when they can use it again."""

import pytest
import torch
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.checkpoint.engine import SaveChoice
from penstock.checkpoint.plan.save_plan import (
    HeldObject,
    Holdings,
    JobPlanner,
    RankShare,
    SaveOptions,
)
from penstock.checkpoint.saver import Saver
from penstock.checkpoint.state.regions import Regions, TensorFacts, whole_regions
from penstock.checkpoint.state.walk import find_stored_name
from penstock.errors import RankFailed, UsageError


def held(
    *shape: int, dtype: str = "float32", name: str = "w", objects: tuple[HeldObject, ...] = ()
) -> Holdings:
    facts = (TensorFacts(name, dtype, shape, 4 if dtype == "float32" else 2),)
    return Holdings(tensors=facts, regions=whole_regions(facts), objects=objects)


def agree(planner: JobPlanner, holdings: Holdings, options: SaveOptions | None = None) -> RankShare:
    options = options or SaveOptions()
    return planner.find(lambda: holdings, options) or planner.plan(holdings, options)


def counts_of_plans(*states: Holdings) -> int:
    """How many plans two replicas make for saves of these states, one after another."""

    def program(comm: ThreadComm) -> int:
        planner = JobPlanner(comm)
        for state in states:
            agree(planner, state, SaveOptions())
        return planner.num_planned

    (count,) = set(on_ranks(2, program))
    return count


def test_the_same_state_is_planned_once() -> None:
    assert counts_of_plans(held(4), held(4), held(4)) == 1


def test_another_dtype_shape_or_name_is_another_plan() -> None:
    assert counts_of_plans(held(4), held(4, dtype="bfloat16"), held(5), held(4, name="v")) == 4


def test_only_the_last_plan_is_kept() -> None:
    assert counts_of_plans(held(4), held(4), held(8), held(8), held(4)) == 3


def test_options_belong_to_what_is_planned() -> None:
    def program(comm: ThreadComm) -> int:
        planner = JobPlanner(comm)
        agree(planner, held(4), SaveOptions())
        agree(planner, held(4), SaveOptions(min_cut_bytes=1))
        return planner.num_planned

    assert on_ranks(2, program) == [2, 2]


def test_a_rank_that_lost_a_plan_makes_all_plan_again() -> None:
    def program(comm: ThreadComm) -> int:
        planner = JobPlanner(comm)
        agree(planner, held(4), SaveOptions())
        if comm.rank == 1:
            planner = JobPlanner(comm)
        agree(planner, held(4), SaveOptions())
        return planner.num_planned

    assert on_ranks(2, program) == [2, 1]


def test_what_one_rank_cannot_save_fails_all_though_they_know_the_plan() -> None:
    def program(comm: ThreadComm) -> str:
        saver = Saver()
        saver.prepare({"w": torch.ones(4), "last": 1}, comm, SaveChoice())
        with pytest.raises(RankFailed) as caught:
            saver.prepare(
                {"w": torch.ones(4), "last": (lambda: 1) if comm.rank == 1 else 1}, comm, SaveChoice()
            )
        return str(caught.value)

    (failure,) = set(on_ranks(3, program))
    assert failure.startswith("Rank 1 on thread-1 failed")


def test_one_rank_that_holds_something_else_changes_the_plan_of_all() -> None:
    def program(comm: ThreadComm) -> int:
        planner = JobPlanner(comm)
        agree(planner, held(4), SaveOptions())
        agree(planner, held(4, name="v") if comm.rank else held(4), SaveOptions())
        return planner.num_planned

    assert on_ranks(3, program) == [2, 2, 2]


def test_every_rank_writes_its_own_region() -> None:
    def program(comm: ThreadComm) -> RankShare:
        rows = [(0, (4 * comm.rank,), (4,))]
        facts = (TensorFacts("w", "float32", (16,), 4),)
        held_here = Holdings(tensors=facts, regions=Regions.from_rows(rows))
        return agree(JobPlanner(comm), held_here)

    for rank, share in enumerate(on_ranks(4, program)):
        assert share.regions.offsets.tolist() == [[4 * rank]]


def test_a_disagreement_is_raised_on_every_rank() -> None:
    def program(comm: ThreadComm) -> str:
        with pytest.raises(UsageError) as caught:
            agree(JobPlanner(comm), held(4 + comm.rank))
        return str(caught.value)

    assert len(set(on_ranks(3, program))) == 1


def objects_written(*digests: bytes) -> list[list[str]]:
    """The stored names that each rank writes of an object whose digests are these, by rank."""

    def program(comm: ThreadComm) -> list[str]:
        mine = HeldObject(name="rng", size_bytes=100, digest=digests[comm.rank])
        agreed = agree(JobPlanner(comm), held(4, objects=(mine,)))
        return [each.stored_name for each in agreed.objects.placed]

    return on_ranks(len(digests), program)


def test_an_object_that_all_ranks_share_is_written_once() -> None:
    assert objects_written(b"a", b"a", b"a") == [["rng"], [], []]


def test_objects_that_differ_are_all_kept() -> None:
    assert objects_written(b"a", b"b", b"a", b"b") == [["rng"], ["rng@rank1"], [], ["rng@rank3"]]


def test_each_rank_finds_its_own_object_again() -> None:
    stored = {"rng", "rng@rank1", "rng@rank3"}
    found = [find_stored_name("rng", rank, stored) for rank in range(5)]
    assert found == ["rng", "rng@rank1", "rng", "rng@rank3", "rng"]
    assert find_stored_name("lr", 0, stored) is None


def test_objects_are_spread_over_the_ranks_that_share_them() -> None:
    def program(comm: ThreadComm) -> int:
        objects = tuple(HeldObject(name=f"o{k}", size_bytes=10, digest=b"") for k in range(8))
        return len(agree(JobPlanner(comm), held(4, objects=objects)).objects.placed)

    assert on_ranks(4, program) == [2, 2, 2, 2]
