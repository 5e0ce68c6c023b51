"""Ctrl-C on one rank, while ranks plan: its manager refuses further calls, so that no message is misread."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.gloo_ranks import on_gloo_ranks

from penstock.checkpoint.manager.manager import Manager


class Interrupted:
    """A part of a state while whose state is taken Ctrl-C is pressed, once it is set to."""

    is_set = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_set:
            raise KeyboardInterrupt
        return {"x": torch.ones(2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing."""


def ending(call: Callable[[], object]) -> str:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - Ctrl-C, too
        return f"{type(error).__name__}: {error}"
    return "no error"


def interrupt(rank: int, root: Path, action: str) -> list[str]:
    """On both ranks, make a call that is interrupted on rank 1, and then others there."""
    manager, part = Manager(root, timeout_s=3), Interrupted()
    state = {"part": part}
    manager.save(1, state)

    if rank == 1:
        part.is_set = True
        calls = {"save": lambda: manager.save(2, state), "restore": lambda: manager.restore(state)}
        told = [ending(calls[action])]
        part.is_set = False
        told += [ending(call) for call in (*calls.values(), lambda: manager.should_save(3), manager.close)]
    else:
        told = [ending(lambda: manager.save(2, state) if action == "save" else manager.restore(state))]
        manager.__exit__(KeyboardInterrupt, None, None)
    dist.barrier()
    with Manager(root) as another:
        assert another.restore(state) == 1
    return told


@pytest.mark.parametrize("action", ["save", "restore"])
def test_a_rank_that_was_interrupted_refuses_all_later_calls(tmp_path: Path, action: str) -> None:
    first, interrupted = on_gloo_ranks(2, interrupt, tmp_path, action)
    assert first[0].startswith(("WaitTimeout", "RankError"))
    assert "out of step" not in first[0], "the error that came first says what the rank was waiting for"
    assert interrupted[0].startswith("KeyboardInterrupt")
    for told in interrupted[1:]:
        assert "it gave up waiting for the others when it was interrupted" in told
