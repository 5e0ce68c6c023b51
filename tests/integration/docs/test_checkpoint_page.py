"""docs/checkpoint.md runs as it stands, and tells the limits of the code."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from tests.support.child_processes import run_children

from penstock.checkpoint.plan.load_plan import LoadOptions
from penstock.checkpoint.plan.save_plan import SaveOptions
from penstock.transfer.reader import GAP_BYTES, ReadSettings

PAGE = (Path(__file__).parents[3] / "docs" / "checkpoint.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


STOPPED_AT = 10


def run_first_example(rank: int, folder: Path, port: int, killed: bool) -> list[str]:  # noqa: FBT001 - for children
    """What the page's first example prints as one of two ranks. A killed one dies at its tenth step."""
    os.chdir(folder)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)
    printed: list[str] = []

    def note(line: str, *, flush: bool) -> None:
        assert flush
        printed.append(line)
        if killed and f"step {STOPPED_AT}:" in line:
            while not any(Path("run/checkpoints").glob("step-*/.metadata")):
                time.sleep(0.01)
            (Path("..") / f"printed-{rank}.json").write_text(json.dumps(printed), encoding="utf-8")
            # Both have written, so that none is left waiting for the other before it dies.
            while not all((Path("..") / f"printed-{each}.json").exists() for each in range(2)):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    # The weights are drawn before the page seeds its generators, one for each rank.
    torch.manual_seed(7 if killed or folder.name == "whole" else 8)
    exec(compile(BLOCKS[0], "docs/checkpoint.md", "exec"), {"print": note})
    return printed


@pytest.mark.examples
def test_its_first_example_is_killed_and_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    def run(folder: str, *, killed: bool = False) -> list[list[str]]:
        (tmp_path / folder).mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = [(rank, tmp_path / folder, port, killed) for rank in range(2)]
        return run_children([(run_first_example, each) for each in arguments], 120)

    whole = run("whole")
    with pytest.raises(AssertionError, match="child 0: "):
        run("stopped", killed=True)
    for rank in range(2):
        before = json.loads((tmp_path / f"printed-{rank}.json").read_text(encoding="utf-8"))
        assert before == whole[rank][:STOPPED_AT]
    rest = run("stopped")
    for rank in range(2):
        assert 12 - STOPPED_AT < len(rest[rank]) < 12
        assert rest[rank] == whole[rank][-len(rest[rank]) :]
    assert whole[0] != whole[1]


def test_its_limits_are_those_of_the_code() -> None:
    assert f"Regions below {2 * SaveOptions().min_cut_bytes >> 10} KiB are not cut" in WORDS
    assert f"gaps of {LoadOptions().min_gap_bytes >> 10} KiB or more between them are skipped" in WORDS
    assert f"less than {GAP_BYTES >> 10} KiB apart" in WORDS
    assert ReadSettings() == ReadSettings(streams=6, block_bytes=8 << 20)
    assert "six streams in requests of at most 8 MiB" in WORDS
