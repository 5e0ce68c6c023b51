"""`penstock training sweep`: the largest number of accelerators that a storage feeds, by measurement."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cli.training.words import (
    Accelerator,
    Data,
    ReadThreads,
    Results,
    Settings,
    StorageOption,
    WorkloadName,
)

Most = Annotated[int, typer.Option("--most", min=1, metavar="N", help="Try at most N accelerators.")]
RunWords = Annotated[
    list[str] | None, typer.Argument(metavar="[-- WORDS]", help="More words for `penstock training run`.")
]


def sweep(
    workload: WorkloadName,
    run_words: RunWords = None,
    *,
    data: Data,
    results: Results,
    most: Most,
    accelerator: Accelerator = "",
    settings: Settings = None,
    threads: ReadThreads = None,
    option: StorageOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Find how many accelerators the storage feeds: run with 1, 2, 4, ... of them, then in between.

    Every try is a whole run with results of its own. Exits with 1 if not even one accelerator is fed.

    Examples:

      penstock training sweep unet3d --accelerator h100 --data /data/unet3d --results runs --most 16

      penstock training sweep retinanet_b200 --data /data/r --results runs --most 64 -- --hosts a:32,b:32
    """
    from dataclasses import asdict

    from penstock.workflows.sweep import run_command
    from penstock.workflows.sweep import sweep as search

    words = [workload, "--data", data, "--results", results]
    words += ["--accelerator", accelerator] if accelerator else []
    words += [word for setting in settings or () for word in ("--set", setting)]
    words += ["--threads", str(threads)] if threads else []
    words += [word for one in option or () for word in ("--option", one)]
    terminal = Terminal(as_json=as_json)
    found = search(run_command([*words, *(run_words or ())]), most=most)
    rows = [
        {
            "accelerators": str(seen.accelerators),
            "AU %": f"{seen.au_compat:.2f}",
            "samples/s": f"{seen.samples_per_s:,.1f}",
            "fed": "yes" if seen.meets_threshold else "no",
            "limit": seen.bottleneck or "-",
        }
        for seen in found.tries
    ]
    more = ", and perhaps more" if found.is_most else ""
    terminal.result(asdict(found), table(f"{found.accelerators} accelerators are fed{more}", rows))
    if not found.accelerators:
        raise typer.Exit(1)
