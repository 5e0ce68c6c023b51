"""Differential fuzz of checkpoints: random states of one to four ranks, saved and loaded by ours and stock.

    seed -> a tree of tensors and values -> laid out on some ranks, saved by both -> other ranks and layouts
         -> ours loads both, stock loads ours -> every bit is compared with what was saved

What stock cannot do with its own checkpoint is not asked of ours. No failure is what
docs/checkpoint.md lists: stock keeps one rank's value under a name, and knows no empty dicts. Ranks live for
thousands of states.

    python -m tests.adversary.states --seconds 600
"""

import logging
import math
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from tests.adversary.attempts import Attempt, main
from tests.support.child_processes import FunctionRef, clean_context
from tests.support.gloo_ranks import as_rank
from tests.support.saved_values import as_text, data_values
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import penstock.checkpoint as pc
from penstock.checkpoint.torch_dcp import LoadPlanner, Reader, SavePlanner, Writer

RANKS: Final = 4
LIMIT_S: Final = 120.0
DTYPES: Final = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128),
)
EXTENTS: Final = (0, 1, 1, 2, 3, 4, 5, 7, 8, 13, 16)
KEYS: Final = (
    "a",
    "b",
    "weight",
    "0",
    "10",
    "01",
    "*",
    "[0]",
    "a b",
    "é",
    "None",
    "1.5",
    "-1",
    "state",
    "'q'",
    "A",
)
VALUES: Final = [(value,) for value in data_values().values() if not isinstance(value, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor to be: who holds which of its elements follows from the kind and from a layout."""

    kind: str
    """plain, sharded, own (each rank has other values) or staged (only half of the ranks have it)."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int

    def whole(self, rank: int = 0) -> torch.Tensor:
        """All elements: any bits that the dtype may have."""
        bits = np.random.default_rng(self.seed + 1000 * rank).integers(
            0, 256, math.prod(self.shape) * self.dtype.itemsize, np.uint8
        )
        plain = torch.from_numpy(bits & 1 if self.dtype == torch.bool else bits)
        return (
            plain.view(self.dtype).reshape(self.shape)
            if plain.numel()
            else torch.empty(self.shape, dtype=self.dtype)
        )


class Part:
    """A part of a program that has a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


# What a seed stands for.


def draw_leaf(draw: random.Random, kinds: tuple[str, ...]) -> Leaf:
    shape = tuple(draw.choice(EXTENTS) for _ in range(draw.choice((0, 1, 1, 2, 2, 3))))
    if draw.random() < 0.05:
        shape = (draw.choice((257, 1000, 3000)), draw.choice((64, 100)))
    return Leaf(draw.choice(kinds), shape, draw.choice(DTYPES), draw.randrange(1 << 30))


def draw_tree(draw: random.Random, depth: int, kinds: tuple[str, ...]) -> Any:
    chance = draw.random()
    if depth == 0 or chance < 0.35:
        return draw_leaf(draw, kinds) if draw.random() < 0.7 else draw_value(draw)
    if chance < 0.85:
        keys: list[Any] = draw.sample(KEYS, draw.randint(1, 4)) if draw.random() < 0.8 else list(range(3))
        return {key: draw_tree(draw, depth - 1, kinds) for key in keys}
    # A list has the same entries on all ranks.
    everywhere = tuple(kind for kind in kinds if kind != "staged")
    return [draw_tree(draw, depth - 1, everywhere) for _ in range(draw.randint(1, 3))]


def draw_value(draw: random.Random) -> Any:
    return draw.choice(
        (
            *(draw.randrange(-5, 10**6), 0.1, math.nan, -0.0, "é\n", "", b"\0x", True, None, 1 << 70),
            *((1, "a"), {1, 2}, torch.Size([1, 2]), torch.bfloat16, np.float32(1.5), np.arange(3)),
            draw.choice(VALUES),
        )
    )


# From leaves to tensors.


@dataclass(slots=True)
class Place:
    """Where a state is laid out: `size` ranks, of which this is one, and how, by a seed."""

    meshes: dict[int, list[DeviceMesh]]
    halves: dict[int, list[DeviceMesh]]
    rank: int
    size: int
    draw: random.Random
    is_blank: bool = False
    own: Callable[[int], int] = field(default=lambda rank: rank)
    """Whose values a rank of this place has."""

    def build(self, tree: Any) -> Any:
        """The tree with tensors for its leaves; a blank one has other bits, and no values."""
        if isinstance(tree, Leaf):
            return self.tensor(tree)
        if isinstance(tree, dict):
            found = {key: self.build(inner) for key, inner in tree.items()}
            return {key: inner for key, inner in found.items() if inner is not ABSENT}
        if isinstance(tree, list):
            return [self.build(inner) for inner in tree]
        return 0 if self.is_blank else tree

    def tensor(self, leaf: Leaf) -> Any:
        whole = leaf.whole(self.own(self.rank) if leaf.kind == "own" else 0)
        way, turned = self.draw.randrange(4), self.draw.random() < 0.3
        if self.is_blank and whole.numel():
            whole = (whole.reshape(-1).view(torch.uint8) ^ 1).view(leaf.dtype).reshape(leaf.shape)
        if leaf.kind == "sharded" and way:
            return self.sharded(whole, self.draw.choice(self.meshes[self.size]))
        if leaf.kind == "staged" and self.size in self.halves:
            mesh = self.halves[self.size][leaf.seed % 2]
            holders = mesh.mesh.flatten().tolist()
            return self.sharded(whole, mesh if self.rank in holders else None)
        if turned and whole.dim() >= 2:
            return whole.transpose(0, 1).contiguous().transpose(0, 1)
        if turned and whole.dim():
            wide = torch.zeros(2 * whole.shape[0], *whole.shape[1:], dtype=torch.uint8).to(leaf.dtype)[::2]
            return wide.copy_(whole)
        return whole

    def sharded(self, whole: torch.Tensor, mesh: DeviceMesh | None) -> Any:
        # Drawn on all ranks, whether they hold it or not.
        choices = [self.draw.choice((None, *range(whole.dim()))) for _ in range(3)]
        is_strided = self.draw.random() < 0.3
        if mesh is None:
            return ABSENT
        if is_strided and mesh.ndim == 2 and choices[0] is not None:
            return strided(whole, mesh, choices[0])
        placements: list[Placement] = [
            Replicate() if choice is None else Shard(choice) for choice in choices[: mesh.ndim]
        ]
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)


ABSENT: Final = object()


def strided(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """As FSDP over tensor parallelism leaves it: cut by the inner dimension of the mesh first."""
    outer, inner = mesh.get_coordinate() or (0, 0)

    def piece(tensor: torch.Tensor, parts: int, number: int) -> torch.Tensor:
        found = torch.chunk(tensor, parts, dim=dim) if tensor.shape[dim] else ()
        return found[number] if number < len(found) else tensor.narrow(dim, 0, 0)

    local = piece(piece(whole, mesh.size(1), inner), mesh.size(0), outer).clone()
    placements = [_StridedShard(dim, split_factor=mesh.size(1)), Shard(dim)]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """What differs between two states, to the bit."""
    if isinstance(expected, Part):
        return differences(found.state, expected.state, where)
    if isinstance(expected, dict):
        if not isinstance(found, dict) or [*map(repr, found)] != [*map(repr, expected)]:
            return [f"{where} is {str(found)[:60]}, not {str(expected)[:60]}"]
        return [told for key in expected for told in differences(found[key], expected[key], f"{where}.{key}")]
    if isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return [f"{where} is {str(found)[:60]}, not {str(expected)[:60]}"]
        pairs = zip(found, expected, strict=True)
        return [told for at, pair in enumerate(pairs) for told in differences(*pair, f"{where}[{at}]")]
    if isinstance(expected, torch.Tensor) and not expected.is_quantized:
        if (
            not isinstance(found, torch.Tensor)
            or found.dtype != expected.dtype
            or found.shape != expected.shape
        ):
            return [f"{where} is {type(found).__name__} {found!s:.40}"]
        one, other = (each.to_local() if isinstance(each, DTensor) else each for each in (found, expected))
        return (
            []
            if bits_of(one).equal(bits_of(other))
            else [f"{where} ({expected.dtype}, {list(expected.shape)})"]
        )
    return [] if as_text(found) == as_text(expected) else [f"{where} is {found!r:.60}, not {expected!r:.60}"]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, whatever its strides, of which an empty tensor and a single element may have any."""
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return packed.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def has_empty_dict(state: Any) -> bool:
    """Whether there is one anywhere in a state."""
    if isinstance(state, dict):
        return not state or any(map(has_empty_dict, state.values()))
    return isinstance(state, list) and any(map(has_empty_dict, state))


# One rank of the job that saves and loads.


class Rank:
    """A rank that lives for many states, with groups and meshes of each number of ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        whole = range(1, RANKS + 1)
        self.groups = {size: dist.new_group(list(range(size))) for size in whole}
        self.meshes = {
            size: [
                DeviceMesh("cpu", torch.arange(size).reshape(shape))
                for shape in {(size,), (1, size), (size, 1), (2, -1) if size % 2 == 0 else (size,)}
            ]
            for size in whole
        }
        self.halves = {
            size: [DeviceMesh("cpu", half) for half in torch.arange(size).chunk(2)] for size in (2, 4)
        }

    def attempt(self, seed: int, root: Path) -> tuple[str, list[str]]:
        """Save and load one state; its kind, and what is wrong."""
        draw = random.Random(seed)
        first, second = draw.randint(1, RANKS), draw.randint(1, RANKS)
        common = draw_tree(draw, 3, ("plain", "sharded", "sharded", "staged"))
        common = {"model": common, "more": draw_tree(draw, 2, ("plain", "sharded"))}
        own = draw_tree(draw, 2, ("own", "plain"))
        part = draw_tree(draw, 2, ("plain",))
        ways = draw.random() < 0.3, draw.random() < 0.3, draw.random() < 0.2
        layouts = draw.randrange(1 << 30), draw.randrange(1 << 30)
        kind = f"{first} to {second} ranks"

        def place(size: int, layout: int, **changed: Any) -> Place:
            return Place(self.meshes, self.halves, self.rank, size, random.Random(layout), **changed)

        def ours_of(at: Place) -> dict[str, Any]:
            state = {**at.build(common), "own": at.build(own), "rank": at.own(at.rank)}
            return {**state, "part": Part({} if at.is_blank else at.build({"tree": part}))}

        wrong: list[str] = []
        stock_can = True
        if self.rank < first:
            at = place(first, layouts[0])
            state = at.build(common)
            group = self.groups[first]
            # By layout 0 again, so that both save the same.
            whole = ours_of(place(first, layouts[0]))
            self.call(wrong, "ours saves", lambda: self.save(whole, root / "ours", group, by_dcp=ways[0]))
            with suppress(BaseException):
                stock_save(state, checkpoint_id=root / "stock", process_group=group)
        dist.barrier()
        if wrong or not (root / "ours/.metadata").exists():
            return kind, wrong
        if self.rank < second:
            group = self.groups[second]
            whose = {"own": lambda rank: rank if rank < first else 0}
            expected = ours_of(place(second, layouts[1], **whose))
            found = {**ours_of(place(second, layouts[1], is_blank=True, **whose)), "rank": -1}
            if ways[0] or ways[1]:  # by torch's calls, which know no empty parts
                del expected["part"], found["part"]
            self.call(
                wrong,
                "ours loads ours",
                lambda: self.load(found, root / "ours", group, by_dcp=ways[1], verify=ways[2]),
            )
            wrong += [f"ours from ours: {told}" for told in differences(found, expected)]
            plain = place(second, layouts[1]).build(common)

            def by(kind: str, load: Callable[[Any], object]) -> list[str]:
                target = place(second, layouts[1], is_blank=True).build(common)
                told: list[str] = []
                self.call(told, kind, lambda: load(target))
                return told or [f"{kind}: {one}" for one in differences(target, plain)]

            if not (root / "stock/.metadata").exists() or by(
                "", lambda target: stock_load(target, checkpoint_id=root / "stock", process_group=group)
            ):
                stock_can = False
            stock_can = all(self.agree(stock_can, group, second))
            has_empty = any(self.agree(has_empty_dict(plain), group, second))
            if stock_can:
                wrong += by(
                    "ours loads stock's", lambda target: pc.load(target, root / "stock", process_group=group)
                )
            if stock_can and not has_empty:  # torch takes a checkpoint with their entries for one of its 2.3
                wrong += by(
                    "stock loads ours",
                    lambda target: stock_load(target, checkpoint_id=root / "ours", process_group=group),
                )
        dist.barrier()
        return kind + ("" if stock_can else ", not for stock"), wrong

    def agree(self, value: bool, group: Any, size: int) -> list[bool]:  # noqa: FBT001 - it is the value
        told = [False] * size
        dist.all_gather_object(told, value, group=group)
        return told

    def save(self, state: dict[str, Any], path: Path, group: Any, *, by_dcp: bool) -> None:
        if by_dcp:
            # What torch's call is given is a plain dict, whose structure is not recorded.
            plain = {name: each for name, each in state.items() if name != "part"}
            stock_save(plain, storage_writer=Writer(path), planner=SavePlanner(), process_group=group)
        else:
            pc.save(state, path, process_group=group)

    def load(self, state: dict[str, Any], path: Path, group: Any, *, by_dcp: bool, verify: bool) -> None:
        if by_dcp:
            stock_load(state, storage_reader=Reader(path), planner=LoadPlanner(), process_group=group)
        else:
            pc.load(state, path, process_group=group, verify=verify)

    def call(self, wrong: list[str], what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
            cause = traceback.format_exc().splitlines()
            frames = [line.strip() for line in cause if "src/penstock" in line][-1:]
            wrong.append(f"{what}: {type(error).__name__}: {str(error).strip()[-400:]} {frames}")


def serve(rank: int, tasks: Connection, root: Path) -> None:
    """Try the seeds that come in, until there is None."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    this = Rank(rank)
    while (seed := tasks.recv()) is not None:
        tasks.send(this.attempt(seed, root / str(seed)))
        if rank == 0:
            shutil.rmtree(root / str(seed), ignore_errors=True)


class Job:
    """The ranks, as processes."""

    def __init__(self, root: Path) -> None:
        context = clean_context()
        pairs = [context.Pipe() for _ in range(RANKS)]
        self.pipes = [mine for mine, _ in pairs]
        meeting = tempfile.mktemp(dir=root)
        self.processes = [
            context.Process(
                target=as_rank,
                args=(rank, RANKS, meeting, FunctionRef.of(serve), (theirs, root)),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def attempt(self, seed: int) -> Attempt:
        """One state; a job that hangs or dies is ended, and cannot be used again."""
        for pipe in self.pipes:
            pipe.send(seed)
        kind, wrong, waiting = "no answer", dict[int, list[str]](), dict(enumerate(self.pipes))
        while waiting:
            ready = wait(list(waiting.values()), LIMIT_S)
            if not ready:
                return Attempt(kind, seed, f"ranks {list(waiting)} hung; the others: {wrong}")
            for rank, pipe in list(waiting.items()):
                if pipe in ready:
                    try:
                        kind, wrong[rank] = pipe.recv()
                    except EOFError:
                        return Attempt(kind, seed, f"rank {rank} died; the others: {wrong}")
                    del waiting[rank]
        told = {rank: found[:3] for rank, found in wrong.items() if found}
        return Attempt(kind, seed, str(told) if told else "")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def attack(seeds: Iterator[int]) -> Iterator[Attempt]:
    """Save and load random states on one to four ranks."""
    with ExitStack() as exits:
        root = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        job = Job(root)
        exits.callback(lambda: job.end())  # noqa: PLW0108 - of the job that is then the last
        for seed in seeds:
            attempt = job.attempt(seed)
            yield attempt
            if "hung" in attempt.failure or "died" in attempt.failure:
                job.end()
                job = Job(root)


if __name__ == "__main__":
    sys.exit(main(attack))
