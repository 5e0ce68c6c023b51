"""Placing what was read on a device part by part, without a copy in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.checkpoint.place import Destinations, Outbox, Target
from penstock.checkpoint.plan.load_plan import LoadPlan, Transfers
from penstock.checkpoint.state.regions import Regions, TensorFacts
from penstock.transfer.reader import Part

PREFIX_BYTES = 704
FACTS = TensorFacts("w", "float32", (8, 4), 4)


@dataclass(frozen=True, slots=True, eq=False)
class OnDevice(Target):
    """A target with simulated device memory: only `direct_bytes` may touch its bytes."""

    twin: torch.Tensor

    def direct_bytes(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor | None:
        assert (tuple(offsets), tuple(sizes)) == ((0, 0), FACTS.shape)
        return self.twin.reshape(-1).view(torch.uint8)


def transfers(*rows: tuple[int, tuple[int, int], tuple[int, int]]) -> Transfers:
    nothing = np.zeros(len(rows), dtype=np.int64)
    return Transfers(
        read=nothing,
        peer=nothing,
        want=nothing,
        regions=Regions.from_rows(rows),
        in_round=nothing,
        message=nothing,
    )


def landings(target: Target, rows: int) -> Destinations:
    """For a plan of one read of the whole tensor, of whose rows the first ones are wanted here."""
    plan = LoadPlan(
        rank=0,
        row=np.zeros(1, dtype=np.int64),
        regions=Regions.from_rows([(0, (0, 0), (8, 4))]),
        reader=np.zeros(1, dtype=np.int64),
        shown_read=np.zeros(0, dtype=np.int64),
        shown_to=np.zeros(0, dtype=np.int64),
        local=transfers((0, (0, 0), (rows, 4))),
        sends=transfers(),
        receives=transfers(),
    )
    return Destinations(
        plan,
        [PREFIX_BYTES],
        [target],
        tensors=(FACTS,),
        outbox=Outbox((), 1),
        messages=(),
        takes_any_address=True,
    )


def arrive(landing: Destinations, content: bytes) -> None:
    """The item in two parts, as the reading threads hand them on."""
    for begin in (0, 750):
        end = 750 if begin == 0 else len(content)
        assert landing.place(0, begin, end) is None
        landing.take(0, begin, memoryview(bytearray(content[begin:end])))
        landing.arrived(Part(0, begin, end))


def test_parts_for_one_place_on_a_device_are_copied_there_directly() -> None:
    expected, twin = torch.randn(8, 4), torch.zeros(8, 4)
    target = OnDevice((0, 0), torch.empty(8, 4, device="meta"), FACTS, twin)
    landing = landings(target, 8)
    arrive(landing, bytes(PREFIX_BYTES) + expected.numpy().tobytes() + b"suffix")
    assert twin.equal(expected)
    assert landing._shares[0].memory is None


def test_bytes_are_given_where_they_are_contiguous_and_as_stored() -> None:
    def bytes_of(memory: torch.Tensor) -> torch.Tensor | None:
        return Target((0, 0), memory, FACTS).direct_bytes((0, 0), (2, 4))

    assert Target((0, 0), torch.zeros(2, 4), FACTS).contiguous_bytes((0, 0), (2, 4)) is not None
    assert Target((0, 0), torch.zeros(2, 4, device="meta"), FACTS).contiguous_bytes((0, 0), (2, 4)) is None
    assert bytes_of(torch.zeros(2, 4, dtype=torch.half, device="meta")) is None
    assert bytes_of(torch.zeros(4, 2, device="meta").t()) is None
    found = bytes_of(torch.zeros(2, 4, device="meta"))
    assert found is not None
    assert found.shape == (32,)
