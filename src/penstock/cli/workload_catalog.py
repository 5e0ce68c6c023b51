"""`penstock workloads`: the shipped workloads, and every value of one workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from penstock.cli.option_groups import WorkloadOptions
from penstock.cli.options import option, optional_argument, repeated, verb
from penstock.cli.parsers import SETTING, TEXT, WORKLOAD
from penstock.cli.terminal import Terminal, View, bold, table
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.workload.spec import Workload

MAX_LIST_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class _CatalogOptions:
    name: str | None = optional_argument(
        "[WORKLOAD]", WORKLOAD, "Workload to show: unet3d_h100, unet3d with --accelerator, or a YAML file."
    )
    accelerator: str = option(
        "--accelerator",
        TEXT,
        "Emulate this accelerator: h100, b200, ... (default: part of WORKLOAD).",
        default="",
    )
    settings: tuple[str, ...] = repeated("--set", SETTING, "Change a value, e.g. reader.batch_size=14.")


@verb(_CatalogOptions)
def workloads(options: _CatalogOptions, terminal: Terminal) -> None:
    """List the shipped workloads, or show every value of one.

    Examples:

      penstock workloads

      penstock workloads unet3d_h100

      penstock workloads my.yaml --set reader.batch_size=14 --json
    """
    if options.name is None:
        _list(terminal)
    else:
        _show(
            WorkloadOptions(name=options.name, accelerator=options.accelerator, settings=options.settings),
            terminal,
        )


def _list(terminal: Terminal) -> None:
    from penstock.workload.load_workload import shipped

    catalog = [loaded.workload for loaded in shipped()]
    document = {"workloads": [_summarize(workload) for workload in catalog]}
    terminal.result(document, _view_families(catalog))


def _view_families(catalog: Sequence[Workload]) -> View:
    """Each family with its description, and a line for each accelerator with what decides its load."""
    from penstock.workload.shipped_catalog import families

    for name, members in groupby(catalog, key=lambda workload: workload.name):
        yield bold(name)
        yield [("  " + families()[name]["about"], "italic")]
        for workload in members:
            yield f"  {workload.accelerator or 'any':<6} {_describe_load(_summarize(workload))}"


def _describe_load(summary: dict[str, Any]) -> str:
    num_samples = summary["num_samples_per_file"]
    samples = f"{num_samples:,} samples" if num_samples > 1 else "1 sample"
    return (
        f"{summary['num_files_train']:,} {summary['format']} files x {samples} x "
        f"{format_bytes(summary['record_bytes'])}, batch {summary['batch_size']:,}, "
        f"{format_seconds(summary['computation_s'])} a step, AU {summary['au']:.2f}"
    )


def _show(options: WorkloadOptions, terminal: Terminal) -> None:
    from penstock.workload.settings import dotted, flatten, format_value
    from penstock.workload.spec import write_workload

    loaded = options.load(terminal)
    tree = write_workload(loaded.workload)
    rows = [
        {"key": dotted(path), "value": _shorten(value, format_value(value))} for path, value in flatten(tree)
    ]
    document = {
        "name": loaded.workload.name,
        "accelerator": loaded.workload.accelerator,
        "workload": tree,
        "remarks": list(loaded.remarks),
    }
    terminal.result(document, table(loaded.workload.full_name, rows))


def _shorten(value: object, text: str) -> str:
    """A long list's length; `--json` shows lists in full."""
    if isinstance(value, list) and len(text) > MAX_LIST_CHARACTERS:
        return f"{len(value)} entries"
    return text


def _summarize(workload: Workload) -> dict[str, Any]:
    """The values by which one chooses a workload; sizes are means."""
    from penstock.workload.sizing import read_bytes_per_sample, record_bytes

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
