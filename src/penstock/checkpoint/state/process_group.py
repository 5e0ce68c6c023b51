"""The ranks that save or load together: a process group of torch, or this process alone.

All collectives of the engine use a separate group, or the caller's if that has a gloo backend. torch is
imported only if the job has ranks. Invariant: a rank outside of the group gets an error at once, and the
ranks in it do not wait for it.
"""

import atexit
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from socket import gethostname
from typing import Any, Final
from weakref import WeakSet

from penstock.cluster.comm import Comm, SoloComm
from penstock.errors import UsageError


@dataclass(slots=True, eq=False, weakref_slot=True)
class RankGroup:
    """The ranks that this one saves and loads with; `torch_group` is None for one rank, and once closed."""

    comm: Comm
    torch_group: Any = None

    def close(self) -> None:
        """Release the group if it was made for us; each of its ranks calls this."""
        self.comm.close()
        self.torch_group = None


_MADE: Final[WeakSet[RankGroup]] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the remaining groups: gloo's threads release tensors, and must end before the interpreter."""
    for group in tuple(_MADE):
        group.close()


def make_own_group(process_group: Any = None) -> RankGroup:
    """A new group of the ranks of `process_group` (None: all), for work that runs while the program trains.

    Collective over these ranks alone. Its messages never mix with the trainer's own.
    """
    return make_group_of(_list_ranks(process_group))


def make_group_of(ranks: Sequence[int]) -> RankGroup:
    """A new group of these ranks, numbered as in the job. Collective over them alone."""
    if len(ranks) < 2:
        return RankGroup(SoloComm(gethostname()))
    from penstock.cluster.torch_comm import TorchComm, make_group  # noqa: PLC0415 - loads torch

    group = make_group(ranks)
    made = RankGroup(TorchComm(gethostname(), group), group)
    _MADE.add(made)
    return made


@contextmanager
def borrowed_group(process_group: Any = None) -> Iterator[RankGroup]:
    """The caller's group if it has a gloo backend, else a new one, for work that ends within the call."""
    if len(_list_ranks(process_group)) < 2:
        made = RankGroup(SoloComm(gethostname()))
    else:
        import torch.distributed as dist  # noqa: PLC0415 - already loaded by now

        from penstock.cluster.torch_comm import TorchComm  # noqa: PLC0415 - likewise

        group = dist.group.WORLD if process_group is None else process_group
        has_gloo = "gloo" in str(dist.get_backend_config(process_group))
        made = (
            RankGroup(TorchComm(gethostname(), group), group) if has_gloo else make_own_group(process_group)
        )
    try:
        yield made
    finally:
        made.close()


def _list_ranks(process_group: Any) -> list[int]:
    """The ranks of a group, numbered as in the job; only this one if the job has no ranks."""
    if "torch" not in sys.modules:
        # A program that has not imported torch has no process group either.
        return [0]
    import torch.distributed as dist  # noqa: PLC0415 - see above

    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise UsageError(
                "A process group was given, but torch.distributed is not initialized",
                fix="Call torch.distributed.init_process_group first.",
            )
        return [0]
    if process_group is None:
        return list(range(dist.get_world_size()))
    if process_group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(process_group) < 0:
        raise UsageError(
            f"Rank {dist.get_rank()} is not in the process group that was given",
            fix="Call this only on the ranks of the group, or pass the group that this rank belongs to.",
        )
    return dist.get_process_group_ranks(process_group)
