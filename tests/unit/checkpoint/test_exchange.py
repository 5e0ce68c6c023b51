"""Rounds of messages between ranks that are threads: everything arrives, and a failure blocks no rank."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.checkpoint.place import Incoming, Outbox, Outgoing, run_rounds
from penstock.errors import WaitTimeout

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIZE = 8
NUM_ROUNDS = 3


def others(comm: ThreadComm) -> list[int]:
    return [rank for rank in range(comm.size) if rank != comm.rank]


def outgoing(comm: ThreadComm) -> list[Outgoing]:
    return [
        Outgoing(peer, 1 + number, number, SIZE, 1) for number in range(NUM_ROUNDS) for peer in others(comm)
    ]


def exchange(size: int, *, failing: int | None = None) -> list[dict[tuple[int, int], list[int]]]:
    """What each rank got, by sender and number; the failing rank fills only its first message."""

    def program(comm: ThreadComm) -> dict[tuple[int, int], list[int]]:
        got: dict[tuple[int, int], list[int]] = {}
        straight: dict[tuple[int, int], NDArray[np.uint8]] = {}
        incoming = []
        for number in range(NUM_ROUNDS):
            for peer in others(comm):
                key = (peer, 1 + number)
                # Odd rounds go to their place at once, even ones pass memory of their own.
                if number % 2:
                    straight[key] = np.zeros(SIZE, dtype=np.uint8)

                def place(memory: NDArray[np.uint8], key: tuple[int, int] = key) -> None:
                    got[key] = memory.tolist()

                incoming.append(Incoming(*key, number, SIZE, straight.get(key), place))
        outbox = Outbox(outgoing(comm), 60)

        def fill() -> None:
            for message in outbox.messages:
                if comm.rank == failing and message.number > 1:
                    outbox.give_up()
                    return
                outbox.wait_for_room()
                outbox.buffer(message)[:] = 10 * comm.rank + message.number
                outbox.filled(message)

        filling = threading.Thread(target=fill)
        filling.start()
        run_rounds(comm.transfer(), outbox, incoming, 60)
        filling.join()
        return got | {key: memory.tolist() for key, memory in straight.items()}

    return on_ranks(size, program)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_message_arrives_as_it_was_sent(size: int) -> None:
    for rank, got in enumerate(exchange(size)):
        senders = [peer for peer in range(size) if peer != rank]
        assert got == {
            (peer, number): [10 * peer + number] * SIZE
            for peer in senders
            for number in range(1, NUM_ROUNDS + 1)
        }


def test_a_rank_that_fails_to_read_still_sends() -> None:
    results = exchange(3, failing=1)
    assert results[0][2, 3] == [23] * SIZE
    assert results[2][0, 3] == [3] * SIZE
    assert results[0][1, 1] == [11] * SIZE


def test_sent_messages_free_memory() -> None:
    message = Outgoing(1, 1, 0, SIZE, 1)
    outbox = Outbox([message], 60)
    memory = outbox.buffer(message)
    outbox.filled(message)
    assert outbox.wait_filled(message) is memory
    outbox.sent(message)
    assert message.memory is None
    outbox.wait_for_room()


def test_waiting_for_a_message_that_is_never_read_times_out() -> None:
    message = Outgoing(1, 1, 0, SIZE, 1)
    with pytest.raises(WaitTimeout, match="this rank's own reads"):
        Outbox([message], 0.01).wait_filled(message)
