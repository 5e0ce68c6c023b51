"""The same through the worker that stays and was spawned, which shares the trainer's main memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.integration.checkpoint.adapters.programs.ranks import on_forked_ranks, without_cuda
from tests.integration.checkpoint.adapters.programs.resiliency_saves import saves

if TYPE_CHECKING:
    from pathlib import Path


def main(root: Path) -> None:
    without_cuda()
    print(json.dumps(on_forked_ranks(2, saves, root, True)))  # noqa: FBT003, T201 - it travels; the test reads it
