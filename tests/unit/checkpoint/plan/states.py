"""Random states of jobs for tests of planners: tensors cut into grids, regions assigned to sets of ranks."""

from itertools import pairwise, product

import numpy as np
from hypothesis import strategies as st

from penstock.checkpoint.plan.save_plan import Holdings
from penstock.checkpoint.state.regions import Regions, TensorFacts

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "complex128": 16}


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A partition of `shape` into a grid of unequal boxes."""
    cuts = []
    for extent in shape:
        inner = draw(st.sets(st.integers(1, max(extent - 1, 1)), max_size=3)) if extent > 1 else set()
        edges = [0, *sorted(inner), extent]
        cuts.append(list(pairwise(edges)))
    return [
        (tuple(begin for begin, _ in region), tuple(end - begin for begin, end in region))
        for region in product(*cuts)
    ]


@st.composite
def facts(draw: st.DrawFn, name: str) -> TensorFacts:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    return TensorFacts(name, dtype, shape, ITEM_BYTES[dtype])


@st.composite
def tensor_lists(draw: st.DrawFn, max_tensors: int = 4) -> tuple[TensorFacts, ...]:
    return tuple(draw(facts(f"w{number}")) for number in range(draw(st.integers(0, max_tensors))))


@st.composite
def jobs(
    draw: st.DrawFn, tensors: tuple[TensorFacts, ...] | None = None, num_ranks: int | None = None
) -> list[Holdings]:
    """What each rank of a job holds: every box of every tensor on one rank or on several."""
    tensors = draw(tensor_lists()) if tensors is None else tensors
    num_ranks = draw(st.integers(1, 5)) if num_ranks is None else num_ranks
    rows: list[list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = [[] for _ in range(num_ranks)]
    for number, each in enumerate(tensors):
        for offsets, sizes in draw(grids(each.shape)):
            holders = draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))
            for rank in holders:
                rows[rank].append((number, offsets, sizes))
    return [Holdings(tensors=tensors, regions=Regions.from_rows(each)) for each in rows]


def painted(tensors: tuple[TensorFacts, ...], regions: Regions) -> list[np.ndarray]:
    """How often each element of each tensor lies in a box: another way to find gaps and overlaps."""
    counts = [np.zeros(each.shape, dtype=np.int64) for each in tensors]
    for row in range(len(regions)):
        number = int(regions.tensor[row])
        counts[number][region(regions, row, len(tensors[number].shape))] += 1
    return counts


def region(regions: Regions, row: int, num_dims: int) -> tuple[slice, ...]:
    offsets, sizes = regions.region(row, num_dims)
    return tuple(slice(begin, begin + extent) for begin, extent in zip(offsets, sizes, strict=True))
