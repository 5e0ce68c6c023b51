"""One checkpoint in one call: `load(state, path)`, from any format that holds one into live tensors.

The manager's way without the manager. Invariant: it returns on all ranks with the state loaded, or raises on
all of them.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from penstock.checkpoint.engine import LoadChoice
from penstock.checkpoint.loading.load import Loader, LoadReport
from penstock.checkpoint.loading.opening import open_path_together
from penstock.checkpoint.members import meeting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.checkpoint.commit.catalog import AnyPath
    from penstock.checkpoint.engine import Names, State
    from penstock.progress import Progress

DEFAULT_TIMEOUT_S: Final = 1800.0
"""The slowest rank may read so much longer than the fastest."""


def load(  # noqa: PLR0913 - each is a choice of its own, and none without a default is left out
    state: State,
    path: AnyPath,
    *,
    only: Names | None = None,
    exclude: Names | None = None,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    convert_dtypes: bool = False,
    trust: bool = False,
    process_group: Any = None,
    progress: Progress | None = None,
) -> LoadReport:
    """Load the checkpoint at `path` into `state`, in place; what was loaded and what was left. Collective.

    >>> report = pc.load({"model": model.state_dict()}, "/pfs/run/step-100", only="model.*")

    Tensors are filled where they are, everything else is replaced in its dict or list. `path` may be a folder
    of torch's distributed checkpoints, a file of torch.save, or safetensors. `rename` maps names of the state
    to the checkpoint's, as in `{"model.*": "module.*"}`. With `strict=False`, parts that the checkpoint lacks
    stay as they are; a part of another shape is an error always, one of another dtype unless
    `convert_dtypes`. `trust` allows objects whose unpickling may run code out of the checkpoint.
    """
    choice = LoadChoice(
        only=only,
        exclude=exclude,
        rename=rename,
        strict=strict,
        convert_dtypes=convert_dtypes,
        trust=trust,
    )
    with meeting(process_group) as members, closing(Loader()) as loader:
        members.comm.timeout_s = DEFAULT_TIMEOUT_S
        opened = open_path_together(path, members.comm)
        return loader.load_opened(state, opened, members, choice, progress)
