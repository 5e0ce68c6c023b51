"""Strategies for Megatron Core's `dist_checkpointing`, and the folders and tracker that its trainers expect.

    strategy = PenstockSaveStrategy()
    dist_checkpointing.save(sharded_state, folder, strategy, async_sharded_save=True)

The format is Megatron's `torch_dist`: Megatron's strategies load what these save, and vice versa. Invariant:
the tracker names an iteration only when all of its files, including `common.pt`, are durable.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load

from penstock.checkpoint.adapters.async_writer import DEFAULT_STAGING_BYTES, AsyncWriter
from penstock.checkpoint.commit.checkpoints import AnyPath
from penstock.checkpoint.torch_dcp import Reader
from penstock.errors import DataDamaged, Unavailable
from penstock.storage.files.local_files import sync_file, sync_folder
from penstock.storage.protocol import exists, read_object, write_object
from penstock.storage.uri import open_here

try:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import torch as stock
    from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
except ImportError as error:
    raise Unavailable(
        f"Megatron core is not installed: no module {error.name!r}", fix="Run: pip install megatron-core"
    ) from error


BACKEND: Final = "torch_dist"
TRACKER_NAME: Final = "latest_checkpointed_iteration.txt"


class PenstockSaveStrategy(stock.TorchDistSaveShardedStrategy):
    """Megatron's `torch_dist` save strategy with the engine's writer: direct I/O, checksums, a manifest.

    All ranks of the default group save together. Each writes at most `writers` files; half of them hold names
    that begin with `separation_hint`, if it is given. `transforms`, as in `pc.save`, are applied while files
    are written. Plans are not cached between saves.
    """

    def __init__(
        self,
        *,
        writers: int = 2,
        separation_hint: str | None = None,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        transforms: Sequence[str] = (),
        keep_only_main_replica: bool = True,
    ) -> None:
        super().__init__(
            BACKEND,
            1,
            keep_only_main_replica=keep_only_main_replica,
            thread_count=writers,
            separation_hint=separation_hint,
        )
        self._staging_bytes = staging_bytes
        self._transforms = transforms

    def save(self, sharded_state_dict: Any, checkpoint_dir: AnyPath) -> None:
        """Save, and return when the checkpoint is durable. Collective."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: AnyPath) -> Any:
        """Return Megatron's request for a save. Collective.

        Tensors may change once the request has been scheduled.
        """
        renamed, *_ = stock._replace_state_dict_keys_with_sharded_keys(  # noqa: SLF001 - the parent's own
            sharded_state_dict, self.keep_only_main_replica
        )
        writer = AsyncWriter(
            checkpoint_dir,
            writers=self.thread_count,
            separation_hint=self.separation_hint,
            staging_bytes=self._staging_bytes,
            transforms=self._transforms,
        )
        planner = stock.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
        )
        planned, *_ = save_state_dict_async_plan(
            stock.mcore_to_pyt_state_dict(renamed, is_loading=False), writer, planner=planner
        )
        return self._get_save_and_finalize_callbacks(writer, planned)


class PenstockLoadStrategy(stock.TorchDistLoadShardedStrategy):
    """Megatron's `torch_dist` load strategy with the engine's reader.

    Bytes that several ranks need are read once; checksums are verified if there is a manifest. Sharded
    objects must be plain data unless `trust` is set; a tensor whose dtype differs from the checkpoint's is an
    error unless `convert_dtypes` is set. Megatron's own strategy allows both.
    """

    def __init__(self, *, trust: bool = False, convert_dtypes: bool = False) -> None:
        super().__init__()
        self._trust = trust
        self._converts = convert_dtypes

    def load(self, sharded_state_dict: Any, checkpoint_dir: AnyPath) -> Any:
        """Return the state, in which tensors and objects have replaced their descriptions. Collective."""
        strict_shapes, free_shapes = [], {}
        for value in nested_values(sharded_state_dict):
            if isinstance(value, ShardedTensor) and value.allow_shape_mismatch:
                free_shapes[value.key] = value
            elif isinstance(value, ShardedTensor):
                strict_shapes.append(value)
        renamed, flat, renames = stock._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)  # noqa: SLF001 - the parent's own
        state = stock.mcore_to_pyt_state_dict(renamed, is_loading=True)
        reader = Reader(checkpoint_dir, trust=self._trust, convert_dtypes=self._converts)
        planner = stock.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=strict_shapes, allow_shape_mismatch_sharded_tensors=free_shapes
        )
        load(state, storage_reader=reader, planner=planner)
        self.cached_global_metadata = reader.read_metadata()
        loaded = stock._replace_sharded_keys_with_state_dict_keys(  # noqa: SLF001 - likewise
            {key: stock._unwrap_pyt_sharded_tensor(value) for key, value in state.items()},  # noqa: SLF001 - likewise
            flat,
            renames,
        )
        stock._restore_dict_types(loaded, sharded_state_dict)  # noqa: SLF001 - likewise
        return loaded


def iteration_folder(root: AnyPath, iteration: int) -> str:
    """Return the folder in which Megatron keeps the checkpoint of an iteration."""
    return f"{os.fspath(root).rstrip('/')}/iter_{iteration:07d}"


def save_iteration(
    root: AnyPath, iteration: int, sharded_state: Any, strategy: PenstockSaveStrategy | None = None
) -> None:
    """Save to an iteration's folder, then point the tracker to it. `root` is a local path. Collective."""
    folder = iteration_folder(root, iteration)
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(sharded_state, folder, strategy or PenstockSaveStrategy())
    commit_iteration(root, iteration)
    dist.barrier()


def load_iteration(
    root: AnyPath,
    sharded_state: Any,
    iteration: int | None = None,
    strategy: PenstockLoadStrategy | None = None,
) -> tuple[int | None, Any]:
    """Load `iteration` (default: the tracker's); return it and the state, or (None, None). Collective."""
    iteration = latest_iteration(root) if iteration is None else iteration
    if iteration is None:
        return None, None
    folder = iteration_folder(root, iteration)
    return iteration, dist_checkpointing.load(sharded_state, folder, strategy or PenstockLoadStrategy())


def commit_iteration(root: AnyPath, iteration: int) -> None:
    """On rank 0, make Megatron's own files durable, then point the tracker to them.

    The other ranks return at once. Add this call as the last finalize function of an asynchronous save:
    `request.add_finalize_fn(lambda: commit_iteration(root, iteration))`.
    """
    if dist.get_rank() != 0:
        return
    folder = Path(iteration_folder(root, iteration))
    for file in sorted(folder.iterdir()):
        sync_file(file)
    sync_folder(folder)
    sync_folder(folder.parent)
    write_object(open_here(root), TRACKER_NAME, [f"{iteration}".encode()])


def latest_iteration(root: AnyPath) -> int | None:
    """Return the iteration that the tracker names, or None if there is no tracker. Not collective."""
    storage = open_here(root)
    if not exists(storage, TRACKER_NAME):
        return None
    text = bytes(read_object(storage, TRACKER_NAME)).decode(errors="replace").strip()
    if not text.isdecimal():
        raise DataDamaged(
            f"The tracker contains {text[:40]!r} instead of an iteration",
            where=f"{storage.uri}/{TRACKER_NAME}",
            fix="Write the number of the newest complete iter_* folder into it.",
        )
    return int(text)
