"""`penstock submission run checkpointing`: the writes and reads of a checkpointing result."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.checkpoint.asking import CheckpointWords, StorageOption, Target
from penstock.cli.checkpoint.words import ModelName, Subset
from penstock.cli.gates import SkipGate
from penstock.cli.handing_in import Closed, Open, System, Tree, division_of
from penstock.cli.ranks import ranked
from penstock.cli.terminal import JsonFlag, Terminal
from penstock.cluster.comm import Comm

_Writes = Annotated[int, typer.Option("--writes", min=0, help="Checkpoints to write.")]
_Reads = Annotated[int, typer.Option("--reads", min=0, help="Checkpoints to read back.")]
_Accelerator = Annotated[str, typer.Option("--accelerator", help="b200 or mi355: whose memory is saved.")]


@ranked
def checkpointing(
    comm: Comm,
    model: ModelName,
    *,
    to: Target,
    submission: Tree,
    system: System,
    accelerator: _Accelerator,
    closed: Closed = False,
    open_: Open = False,
    writes: _Writes = 10,
    reads: _Reads = 10,
    subset: Subset = False,
    option: StorageOption = None,
    skip_gate: SkipGate = None,
    as_json: JsonFlag = False,
) -> int:
    """Write ten checkpoints, read ten back, and leave the leaf of it: a whole checkpointing result.

    Caches are dropped, and shown to be cold, before each read. A storage that changes hosts between writing
    and reading is run twice, with `--reads 0` and then with `--writes 0`. Gates come first: a closed one ends
    this with exit code 3.

    Examples:

      penstock submission run checkpointing llama3-8b --accelerator b200 --to /mnt/ckpt --ranks 8 --closed
      --submission ~/results --system fast
    """
    from penstock.cli.checkpoint.run import carry_out_words

    words = CheckpointWords(
        model=model,
        to=to,
        results=submission,
        writes=writes,
        reads=reads,
        subset=subset,
        option=option,
        skip_gate=skip_gate,
        submitted=division_of(closed=closed, open_=open_),
        tree=submission,
        system=system,
        accelerator=accelerator,
    )
    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    return carry_out_words(words, comm=comm, terminal=terminal)
