"""`penstock workloads`: what is shipped, and every value of one workload."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.workload.spec import Workload


def workloads(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="unet3d_h100, unet3d with --accelerator, or a YAML file."),
    ] = None,
    *,
    accelerator: Annotated[str, typer.Option("--accelerator", help="h100, b200, ...")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value; repeatable.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the shipped workloads, or show every value of one.

    Examples:

      penstock workloads

      penstock workloads unet3d_h100

      penstock workloads my.yaml --set reader.batch_size=14 --json
    """
    terminal = Terminal(as_json=as_json)
    if name is None:
        _list(terminal)
    else:
        _show(terminal, name, accelerator, settings or [])


def _list(terminal: Terminal) -> None:
    from penstock.workload.loading import shipped

    found = [loaded.workload for loaded in shipped()]
    document = {"workloads": [_summary(workload) for workload in found]}
    terminal.result(document, lambda console: _draw_families(console, found))


def _draw_families(console: Console, found: list[Workload]) -> None:
    """Each family once with what it is, and a line for each accelerator with what decides its load."""
    from penstock.workload.shipped_catalog import families

    for name, members in groupby(found, key=lambda workload: workload.name):
        console.print(f"[bold]{name}[/bold]")
        console.print(f"  [italic]{families()[name].about}[/italic]")
        for workload in members:
            console.print(f"  {workload.accelerator or 'any':<6} {_load_text(_summary(workload))}")


def _load_text(found: dict[str, Any]) -> str:
    from penstock.units import format_bytes, format_seconds

    num_samples = found["num_samples_per_file"]
    samples = f"{num_samples:,} samples" if num_samples > 1 else "1 sample"
    return (
        f"{found['num_files_train']:,} {found['format']} files x {samples} x "
        f"{format_bytes(found['record_bytes'])}, batch {found['batch_size']:,}, "
        f"{format_seconds(found['computation_s'])} a step, AU {found['au']:.2f}"
    )


def _show(terminal: Terminal, name: str, accelerator: str, settings: list[str]) -> None:
    from penstock.workload.layered_settings import dotted, flatten
    from penstock.workload.loading import load
    from penstock.workload.overrides import format_value, parse_settings
    from penstock.workload.workload_schema import write_workload

    loaded = load(name, accelerator=accelerator, overrides=parse_settings(settings))
    for remark in loaded.remarks:
        terminal.note(str(remark))
    tree = write_workload(loaded.workload)
    rows = [
        {"key": dotted(path), "value": _shortened(value, format_value(value))}
        for path, value in flatten(tree)
    ]
    document = {
        "name": loaded.workload.name,
        "accelerator": loaded.workload.accelerator,
        "workload": tree,
        "remarks": [str(remark) for remark in loaded.remarks],
    }
    terminal.result(document, table(loaded.workload.full_name, rows))


def _shortened(value: object, text: str) -> str:
    """Long lists by their length; `--json` shows them whole."""
    return f"{len(value)} entries" if isinstance(value, list) and len(text) > 60 else text


def _summary(workload: Workload) -> dict[str, Any]:
    """The values by which people choose a workload; sizes are means."""
    from penstock.workload.dataset_size import read_bytes_per_sample, record_bytes

    dataset = workload.dataset
    return {
        "name": workload.full_name,
        "family": workload.name,
        "accelerator": workload.accelerator,
        "format": dataset.format.value,
        "num_files_train": dataset.num_files_train,
        "num_samples_per_file": dataset.num_samples_per_file,
        "record_bytes": float(record_bytes(dataset)),
        "read_bytes_per_sample": float(read_bytes_per_sample(dataset)),
        "batch_size": workload.reader.batch_size,
        "computation_s": workload.train.computation_time.expected_s,
        "epochs": workload.train.epochs,
        "au": workload.metric.au,
        "framework": workload.framework.value,
    }
