"""One checkpoint in one call: `save(state, path)`, from the live tensors to a committed folder.

The manager's way without the manager. Invariant: when it returns, the checkpoint is whole and durable on
every rank; when it raises, it raises on every rank, and what was committed there before still stands.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from penstock.checkpoint.commit.catalog import open_around
from penstock.checkpoint.commit.transaction import Target, complete
from penstock.checkpoint.engine import SaveChoice
from penstock.checkpoint.members import meeting
from penstock.checkpoint.plan.records import SaveOptions
from penstock.checkpoint.saving import WAITING_BUFFER_BYTES, Saver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.commit.catalog import AnyPath
    from penstock.checkpoint.engine import Names, State
    from penstock.checkpoint.staging.base import ShareStats
    from penstock.progress import Progress

DEFAULT_TIMEOUT_S: Final = 1800.0


def save(  # noqa: PLR0913 - a save has as many choices
    state: State,
    path: AnyPath,
    *,
    only: Names | None = None,
    dtype: Any = None,
    writers: int = 2,
    separation_hint: str | None = None,
    transforms: Sequence[str] = (),
    process_group: Any = None,
    progress: Progress | None = None,
) -> tuple[ShareStats, ...]:
    """Save `state` as one checkpoint at `path`; what each rank spent on it, in rank order. Collective.

    >>> pc.save({"model": model.state_dict(), "step": 100}, "/pfs/run/step-100")

    A checkpoint that lies there already is replaced in one step, once the new one is whole. `only` saves the
    parts whose names match, `dtype` converts tensors of floating point. With `transforms`, as in
    `["stream.zstd/1"]`, items are smaller, but can be read only as wholes.
    """
    options = SaveOptions(writers=writers, separation_hint=separation_hint)
    saver = Saver(options, staging_bytes=WAITING_BUFFER_BYTES, transforms=transforms)
    with meeting(process_group) as members, closing(saver):
        storage, name = open_around(path, rank=members.comm.rank)
        prepared = saver.prepare(state, members, SaveChoice(only=only, dtype=dtype))
        target = Target(storage=storage, name=name, facts={})
        _, stats = complete(
            prepared,
            prepared.stage("commit"),
            target,
            members.comm,
            timeout_s=DEFAULT_TIMEOUT_S,
            progress=progress,
        )
    return stats
