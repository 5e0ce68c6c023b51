"""`penstock training size` and `whatif`: what a workload needs, by arithmetic, with the proof."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import values
from penstock.cli.terminal import JsonFlag, Terminal
from penstock.cli.training.words import Accelerator, Settings, WorkloadName, load_workload

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.workload.accelerator_forecast import Forecast
    from penstock.workload.dataset_size import Sizing, Verdict
    from penstock.workload.loading import Loaded
    from penstock.workload.spec import Workload


def size(
    workload: WorkloadName,
    *,
    accelerators: Annotated[int, typer.Option("--accelerators", min=1, help="How many, over all hosts.")],
    host_memory: Annotated[
        str,
        typer.Option("--host-memory", metavar="SIZE,...", help="Of each host; one value if all are equal."),
    ],
    accelerator: Accelerator = "",
    hosts: Annotated[
        int | None, typer.Option("--hosts", min=1, help="How many hosts; else as many as memories.")
    ] = None,
    settings: Settings = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell how large the data set must be, with the proof, and what to run next.

    Two rules: 500 steps for every accelerator, and five times the memory of all hosts.

    Examples:

      penstock training size unet3d --accelerator h100 --accelerators 8 --hosts 2 --host-memory 512GiB

      penstock training size retinanet_b200 --accelerators 4 --host-memory 256GiB,512GiB --json
    """
    from penstock.workload import dataset_size

    terminal = Terminal(as_json=as_json)
    loaded = load_workload(terminal, workload, accelerator, settings)
    request = dataset_size.sizing_request(
        loaded.workload, num_accelerators=accelerators, host_memory_bytes=_memories(host_memory, hosts)
    )
    found = dataset_size.size(request)
    verdict = found.judge(loaded.workload.dataset.num_files_train)
    command = _next_command(workload, accelerator, settings or [], found)
    terminal.result(
        _sizing_document(loaded, found, verdict, command),
        lambda console: _draw_sizing(console, loaded.workload, found, verdict, command),
    )


def whatif(
    workload: WorkloadName,
    *,
    bandwidth: Annotated[
        str, typer.Option("--bandwidth", metavar="RATE", help="What storage delivers, e.g. 40GiB/s.")
    ],
    accelerator: Accelerator = "",
    settings: Settings = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell how many accelerators a bandwidth can feed, by arithmetic, with the proof.

    Examples:

      penstock training whatif unet3d --accelerator h100 --bandwidth 40GiB/s

      penstock training whatif dlrm_b200 --bandwidth 100GB/s --json
    """
    from penstock.workload.accelerator_forecast import forecast

    terminal = Terminal(as_json=as_json)
    loaded = load_workload(terminal, workload, accelerator, settings)
    found = forecast(loaded.workload, Fraction(values.rate("--bandwidth", bandwidth)))
    terminal.result(
        _forecast_document(loaded, found), lambda console: _draw_forecast(console, loaded.workload, found)
    )


def _memories(text: str, hosts: int | None) -> tuple[int, ...]:
    """One memory a host: a single value counts for all hosts."""
    from penstock.errors import UsageError

    given = values.sizes("--host-memory", text)
    if len(given) == 1:
        return given * (hosts or 1)
    if hosts not in (None, len(given)):
        raise UsageError(
            f"{len(given)} memories for {hosts} hosts",
            where="--host-memory",
            fix="Give one, or one for each host.",
        )
    return given


def _next_command(name: str, accelerator: str, settings: list[str], found: Sizing) -> str:
    """The command that makes this data set: the user's settings, secrets apart, then the computed ones."""
    import shlex

    from penstock.workload.overrides import parse_settings

    given = [override.source.removeprefix("--set ") for override in parse_settings(settings)]
    changes = [*given, f"dataset.num_files_train={found.min_files}"]
    if found.num_subfolders:
        changes.append(f"dataset.num_subfolders_train={found.num_subfolders}")
    words = ["penstock", "training", "generate", name]
    words += ["--accelerator", accelerator] if accelerator else []
    words += [word for change in changes for word in ("--set", change)]
    return f"{shlex.join(words)} --data URI"


def _sizing_document(loaded: Loaded, found: Sizing, verdict: Verdict, command: str) -> dict[str, Any]:
    request = found.request
    return {
        "workload": loaded.workload.full_name,
        "accelerators": request.num_accelerators,
        "hosts": len(request.host_memory_bytes),
        "host_memory_bytes": list(request.host_memory_bytes),
        "record_bytes": float(request.record_bytes),
        "min_samples_by_steps": found.min_samples_by_steps,
        "min_samples_by_memory": found.min_samples_by_memory,
        "min_samples": found.min_samples,
        "num_files_train": found.min_files,
        "num_subfolders_train": found.num_subfolders,
        "dataset_bytes": found.dataset_bytes,
        "bytes_per_accelerator_per_s": _number(found.bytes_per_accelerator_per_s),
        "bytes_per_s": _number(found.bytes_per_s),
        "proof": list(found.proof),
        "as_configured": {
            "num_files_train": loaded.workload.dataset.num_files_train,
            "passed": verdict.passed,
            "proof": verdict.proof,
        },
        "next_command": command,
        "remarks": [str(remark) for remark in loaded.remarks],
    }


def _number(value: Fraction | None) -> float | None:
    return None if value is None else float(value)


def _draw_sizing(console: Console, workload: Workload, found: Sizing, verdict: Verdict, command: str) -> None:
    from rich.markup import escape

    from penstock.units import format_rate
    from penstock.workload.dataset_size import describe_size

    folders = f" in {found.num_subfolders:,} subfolders" if found.num_subfolders else ""
    console.print(f"[bold]{escape(workload.full_name)}[/bold]")
    console.print(f"  at least  {found.min_files:,} files{folders}, {describe_size(found.dataset_bytes)}")
    if found.bytes_per_accelerator_per_s is not None and found.bytes_per_s is not None:
        each, all_of_them = float(found.bytes_per_accelerator_per_s), float(found.bytes_per_s)
        console.print(f"  reads     {format_rate(all_of_them)} at 100 %, {format_rate(each)} an accelerator")
    for line in found.proof:
        console.print(f"  proof     {escape(line)}")
    console.print(f"  as it is  {verdict.proof}: {'enough' if verdict.passed else 'too few'}")
    console.print(f"  next      {escape(command)}")


def _forecast_document(loaded: Loaded, found: Forecast) -> dict[str, Any]:
    return {
        "workload": loaded.workload.full_name,
        "bandwidth_bytes_per_s": float(found.bandwidth_bytes_per_s),
        "accelerators": found.num_accelerators,
        "au": float(found.au),
        "au_with_one_more": float(found.au_with_one_more),
        "au_threshold": float(found.threshold),
        "step_read_bytes": float(found.step_read_bytes),
        "computation_s": float(found.computation_s),
        "bytes_per_accelerator_per_s": float(found.bytes_per_accelerator_per_s),
        "proof": list(found.proof),
        "remarks": [str(remark) for remark in loaded.remarks],
    }


def _draw_forecast(console: Console, workload: Workload, found: Forecast) -> None:
    from rich.markup import escape

    from penstock.units import format_rate

    rate = format_rate(float(found.bandwidth_bytes_per_s))
    console.print(f"[bold]{escape(workload.full_name)}[/bold]")
    console.print(f"  {rate} feeds {found.num_accelerators:,} of them")
    for line in found.proof:
        console.print(f"  proof     {escape(line)}")
