"""The contract suite of `Comm`, also as a program: `mpiexec -n 4 python -m tests.support.comm_contract`.

To test a communicator, call `check_comm` on each of its ranks. Invariant: all clauses are collective and
leave the ranks in step, except `check_absence`, after which the communicator is unusable.
"""

import math
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from penstock.cluster.comm import Comm, all_gather_results, decide_on_rank0, divide_on_rank0
from penstock.cluster.supervision import join_ranks
from penstock.environment import process_environment
from penstock.errors import RankError, RankFailed, WaitTimeout

Kind = TypeVar("Kind", bound=Exception)

LIMIT_S = 60.0
BIG_BYTES = 5 * 1024 * 1024 + 3


def check_comm(comm: Comm) -> None:
    """Run every clause on this rank; collective. AssertionError names the broken promise."""
    for clause in CLAUSES:
        clause(comm)
        comm.barrier(awaiting=f"all ranks to pass {clause.__name__}", timeout_s=LIMIT_S)


def _knows_its_place(comm: Comm) -> None:
    ranks = comm.gather(comm.rank, awaiting="all ranks' numbers", timeout_s=LIMIT_S)
    assert ranks == list(range(comm.size)), f"ranks come as {ranks}"
    assert comm.host, "a rank has no host to be named by"


def _barrier_holds_everyone(comm: Comm) -> None:
    for turn in range(20):
        comm.barrier(awaiting=f"turn {turn}", timeout_s=LIMIT_S)


def _broadcast_is_of_rank_0(comm: Comm) -> None:
    value = {"from": comm.rank, "nested": [1.5, None, "å", b"\0"]} if comm.rank == 0 else None
    received = comm.broadcast(value, awaiting="rank 0's plan", timeout_s=LIMIT_S)
    assert received == {"from": 0, "nested": [1.5, None, "å", b"\0"]}, f"broadcast brought {received}"
    ignored = comm.broadcast(comm.rank, awaiting="rank 0's number", timeout_s=LIMIT_S)
    assert ignored == 0, f"another rank's value came through: {ignored}"
    assert comm.broadcast(None, awaiting="nothing", timeout_s=LIMIT_S) is None, "None is a value too"


def _gather_keeps_order_and_sizes(comm: Comm) -> None:
    mine = bytes([comm.rank % 256]) * (comm.rank * 1000)
    gathered = comm.gather(mine, awaiting="values of unequal size", timeout_s=LIMIT_S)
    assert [len(value) for value in gathered] == [rank * 1000 for rank in range(comm.size)]
    assert all(set(value) <= {rank % 256} for rank, value in enumerate(gathered)), "values are mixed up"


def _bytes_for_rank_0_come_to_it_alone(comm: Comm) -> None:
    # Around 504 bytes, gloo turns from one message to two.
    for size_bytes in (comm.rank * 1000, BIG_BYTES, 504, 505, 0):
        mine = bytes([comm.rank % 256]) * size_bytes
        gathered = comm.gather_bytes_on_rank0(mine, awaiting="bytes for rank 0", timeout_s=LIMIT_S)
        if comm.rank != 0:
            assert gathered == [], "others are spared what rank 0 gets"
            continue
        assert len(gathered) == comm.size, "rank 0 misses a value"
        assert all(set(value) <= {rank % 256} for rank, value in enumerate(gathered)), "values are mixed up"
        assert len(gathered[0]) == size_bytes, "a value was cut"


def _each_rank_gets_its_part_of_what_is_scattered(comm: Comm) -> None:
    same = bytes(BIG_BYTES)
    for parts in (
        [bytes([rank % 256]) * (rank * 1000) for rank in range(comm.size)],
        [bytes([rank % 256]) * 3 for rank in range(comm.size)],
        [b""] * comm.size,
        [same] * comm.size,
    ):
        given = parts if comm.rank == 0 else None
        part = comm.scatter_bytes(given, awaiting="a part", timeout_s=LIMIT_S)
        assert part == parts[comm.rank], "a part was mixed up or cut"


def _rank_0_divides_what_all_ranks_have(comm: Comm) -> None:
    part = divide_on_rank0(
        comm, lambda: comm.rank, lambda ranks: [rank * 10 for rank in ranks], awaiting="parts"
    )
    assert part == comm.rank * 10, f"rank {comm.rank} got {part}"
    total = decide_on_rank0(comm, lambda: comm.rank, lambda ranks: sum(ranks, start=0), awaiting="a sum")
    assert total == sum(range(comm.size)), f"the ranks add up to {total}"
    sick = comm.size - 1

    def work() -> Callable[[], None] | None:
        return (lambda: None) if comm.rank == sick else None

    error = _error_of(
        RankFailed if comm.size > 1 else ZeroDivisionError,
        lambda: decide_on_rank0(comm, work if comm.size > 1 else (lambda: None), divide, awaiting="a value"),
    )
    if isinstance(error, RankFailed):
        assert error.rank == sick, f"rank {error.rank} is blamed for rank {sick}"
        error = _error_of(RankFailed, lambda: decide_on_rank0(comm, lambda: 1, divide, awaiting="a quotient"))
        assert error.rank == 0, "what rank 0 decides fails there"
        assert "ZeroDivisionError" in error.cause, error.cause


def divide(values: list[Any]) -> float:
    """Fail on whatever is given."""
    return len(values) / 0


def _big_values_arrive_whole(comm: Comm) -> None:
    block = np.arange(BIG_BYTES, dtype=np.uint8) + np.uint8(comm.rank % 256)
    received = comm.broadcast(block, awaiting="a big block", timeout_s=LIMIT_S)
    assert np.array_equal(received, np.arange(BIG_BYTES, dtype=np.uint8)), "the block was damaged"
    for rank, gathered in enumerate(comm.gather(block, awaiting="big blocks", timeout_s=LIMIT_S)):
        assert int(gathered[0]) == rank % 256, "blocks are mixed up"
        assert gathered.size == BIG_BYTES, "a block was cut"


def _reductions_are_exact(comm: Comm) -> None:
    total = comm.reduce(2**70 + comm.rank, "sum", awaiting="a sum", timeout_s=LIMIT_S)
    assert total == comm.size * 2**70 + sum(range(comm.size)), "whole numbers of any size add exactly"
    assert comm.reduce(comm.rank, "min", awaiting="a minimum", timeout_s=LIMIT_S) == 0
    assert comm.reduce(comm.rank, "max", awaiting="a maximum", timeout_s=LIMIT_S) == comm.size - 1
    mean = comm.reduce(0.5, "sum", awaiting="a sum of fractions", timeout_s=LIMIT_S) / comm.size
    assert math.isclose(mean, 0.5), "fractions stay fractions"


def _reductions_agree_to_the_bit(comm: Comm) -> None:
    mine = random.Random(comm.rank).random()
    total = comm.reduce(mine, "sum", awaiting="a sum that rounds", timeout_s=LIMIT_S)
    assert len(set(comm.gather(total, awaiting="everyone's sum", timeout_s=LIMIT_S))) == 1


def _what_cannot_travel_fails_everywhere(comm: Comm) -> None:
    sick = comm.size - 1
    value = (lambda: None) if comm.rank == sick else None
    error = _error_of(
        RankFailed, lambda: comm.gather(value, awaiting="what cannot be packed", timeout_s=LIMIT_S)
    )
    assert error.rank == sick, f"rank {error.rank} is blamed for rank {sick}"
    assert "function" in error.cause, f"the cause does not name the kind: {error.cause}"


def _a_failed_step_fails_everywhere(comm: Comm) -> None:
    sick = comm.size - 1

    def work() -> int:
        if comm.rank == sick:
            raise ValueError("the tank is empty")
        return comm.rank

    error = _error_of(
        RankFailed, lambda: all_gather_results(comm, work, awaiting="all ranks to drink", timeout_s=LIMIT_S)
    )
    assert error.rank == sick, f"rank {error.rank} is blamed for rank {sick}"
    assert error.cause == "ValueError: the tank is empty", error.cause
    assert all_gather_results(comm, lambda: comm.rank, awaiting="another try", timeout_s=LIMIT_S) == list(
        range(comm.size)
    )


def _bytes_go_round_a_ring(comm: Comm) -> None:
    if comm.size == 1:
        return
    transfer = comm.transfer()
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size > 1:
        for tag, num_bytes in ((3, BIG_BYTES), (0, 1), (7, 0)):
            mine = memoryview(bytearray([comm.rank % 256]) * num_bytes)
            received = memoryview(bytearray(num_bytes))
            moves = (
                transfer.receive(before, received, tag=tag),
                transfer.send(after, mine, tag=tag),
            )
            for move in moves:
                move.wait(awaiting="a ring of bytes", timeout_s=LIMIT_S)
            assert received == bytes([before % 256]) * num_bytes, "a message was damaged or mixed up"
    comm.barrier(awaiting="all ranks to have their bytes", timeout_s=LIMIT_S)
    transfer.close()


CLAUSES: tuple[Callable[[Comm], None], ...] = (
    _knows_its_place,
    _barrier_holds_everyone,
    _broadcast_is_of_rank_0,
    _gather_keeps_order_and_sizes,
    _bytes_for_rank_0_come_to_it_alone,
    _each_rank_gets_its_part_of_what_is_scattered,
    _rank_0_divides_what_all_ranks_have,
    _big_values_arrive_whole,
    _reductions_are_exact,
    _reductions_agree_to_the_bit,
    _what_cannot_travel_fails_everywhere,
    _a_failed_step_fails_everywhere,
    _bytes_go_round_a_ring,
)


def check_absence(comm: Comm, *, limit_s: float = 0.5) -> None:
    """Rank 0 stays away: all others must time out, with what they awaited, and be refused afterwards.

    Needs two ranks or more. The ranks are out of step afterwards: end the process without closing `comm`.
    """
    assert comm.size > 1, "nobody can be missed in a job of one"
    if comm.rank == 0:
        return
    late = _error_of(WaitTimeout, lambda: comm.barrier(awaiting="rank 0 to come home", timeout_s=limit_s))
    assert late.awaited == "rank 0 to come home", late.awaited
    assert late.timeout_s == limit_s, late.timeout_s
    lost = _error_of(RankError, lambda: comm.barrier(awaiting="a second chance", timeout_s=limit_s))
    assert "rank 0 to come home" in str(lost), f"the error does not say where it began: {lost}"


def _error_of(kind: type[Kind], call: Callable[[], object]) -> Kind:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def main() -> None:
    """Check the communicator of this process's job."""
    comm = join_ranks(process_environment())
    check_comm(comm)
    comm.close()


if __name__ == "__main__":
    main()
