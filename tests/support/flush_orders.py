"""Orders for cached steps, as a trainer writes them: for tests of what daemons make of them.

Place in the flow: between a cache that a manager has filled and the daemon. Invariant: an order says of its
step what lies in the caches, so tests that want it wrong change fields by name.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.checkpoint.levels.flush.daemon import Daemon
from penstock.checkpoint.levels.flush.flush_folder import FlushFolder, FlushOrder, OrderedFile
from penstock.storage import Storage
from penstock.storage.uri import open_here


def save_id_of(cache: Path, step: int) -> str:
    """Which save of a step lies there."""
    return str(json.loads((cache / f"step-{step}/penstock.json").read_bytes())["save_id"])


def files_of(cache: Path, step: int) -> list[OrderedFile]:
    """The data files of a step in one cache."""
    paths = sorted((cache / f"step-{step}").glob("*.distcp"))
    return [OrderedFile(name=path.name, size_bytes=path.stat().st_size) for path in paths]


def order(root: Path, step: int, *caches: str, node: int = 0, **fields: Any) -> FlushFolder:
    """Give the daemon of one of the `caches`, by its number, the order for a step; the flush folder there."""
    names = caches or ("cache",)
    folder = FlushFolder(root / names[node])
    given = {
        "step": step,
        "save_id": save_id_of(folder.cache, step),
        "durable": f"file://{root}/durable",
        "node": node,
        "nodes": [files_of(root / name, step) for name in names],
        "keep": None,
        "bytes_per_s": None,
        "threads": 1,
        "pause_while_saving": False,
        "cores": [],
        "given_s": time.time(),
        **fields,
    }
    folder.orders.put(FlushOrder.model_validate(given))
    return folder


def serve(folder: FlushFolder, open_storage: Callable[[str], Storage] = open_here, **choices: Any) -> None:
    """Be the daemon of a cache, in this process, until nothing is left that can be done at once."""
    settings = {"linger_s": 0.0, "patience_s": 0.0, **choices}
    with folder.locked() as held:
        Daemon(folder, held, open_storage=open_storage, **settings).run()
