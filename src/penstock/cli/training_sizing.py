"""`penstock training size`, `whatif` and `plan`: what a workload needs and reads, by arithmetic alone."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from penstock.cli.option_groups import WorkloadOptions
from penstock.cli.options import group, option, required, verb
from penstock.cli.parsers import DIVISION, RATE, SIZE, several, whole
from penstock.cli.terminal import Terminal, table
from penstock.errors import UsageError
from penstock.units import format_rate

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.bench.epoch_order import Remainder
    from penstock.workload.accelerator_forecast import AcceleratorForecast
    from penstock.workload.dataset_size import DatasetSizing, SizeCheck
    from penstock.workload.loading import LoadedWorkload
    from penstock.workload.spec import Workload


@dataclass(frozen=True, kw_only=True)
class _SizeOptions:
    workload: WorkloadOptions = group(WorkloadOptions)
    accelerators: int = required("--accelerators", whole(1), "Number of accelerators on all hosts together.")
    host_memory: tuple[int, ...] = required(
        "--host-memory", several(SIZE), "Memory of each host; one value if all hosts are equal."
    )
    hosts: int | None = option(
        "--hosts", whole(1), "Number of hosts (default: as many as --host-memory has values)."
    )

    @property
    def memory_of_hosts(self) -> tuple[int, ...]:
        """One memory size for each host."""
        if len(self.host_memory) == 1:
            return self.host_memory * (self.hosts or 1)
        if self.hosts not in (None, len(self.host_memory)):
            raise UsageError(
                f"{len(self.host_memory)} memory sizes for {self.hosts} hosts",
                where="--host-memory",
                fix="Give one value, or one for each host.",
            )
        return self.host_memory


@verb(_SizeOptions)
def size(options: _SizeOptions, terminal: Terminal) -> None:
    """Calculate how large the data set must be, with the proof, and print the command that makes it.

    Two rules decide: 500 steps for every accelerator, and five times the memory of all hosts.

    Examples:

      penstock training size unet3d --accelerator h100 --accelerators 8 --hosts 2 --host-memory 512GiB

      penstock training size retinanet_b200 --accelerators 4 --host-memory 256GiB,512GiB --json
    """
    from penstock.workload import dataset_size

    loaded = options.workload.load(terminal)
    request = dataset_size.make_sizing_request(
        loaded.workload, num_accelerators=options.accelerators, host_memory_bytes=options.memory_of_hosts
    )
    required_size = dataset_size.size_dataset(request)
    verdict = required_size.check_files(loaded.workload.dataset.num_files_train)
    command = _next_command(options.workload, required_size)
    terminal.result(
        _sizing_document(loaded, required_size, verdict, command),
        lambda console: _draw_sizing(console, loaded.workload, required_size, verdict, command),
    )


@dataclass(frozen=True, kw_only=True)
class _WhatIfOptions:
    workload: WorkloadOptions = group(WorkloadOptions)
    bandwidth: float = required("--bandwidth", RATE, "Read bandwidth of the storage, e.g. 40GiB/s.")


@verb(_WhatIfOptions)
def whatif(options: _WhatIfOptions, terminal: Terminal) -> None:
    """Calculate how many accelerators a storage bandwidth can feed, with the proof.

    Examples:

      penstock training whatif unet3d --accelerator h100 --bandwidth 40GiB/s

      penstock training whatif dlrm_b200 --bandwidth 100GB/s --json
    """
    from penstock.workload.accelerator_forecast import forecast_accelerators

    loaded = options.workload.load(terminal)
    prediction = forecast_accelerators(loaded.workload, Fraction(options.bandwidth))
    terminal.result(
        _forecast_document(loaded, prediction),
        lambda console: _draw_forecast(console, loaded.workload, prediction),
    )


@dataclass(frozen=True, kw_only=True)
class _PlanOptions:
    workload: WorkloadOptions = group(WorkloadOptions)
    ranks: int = option(
        "--ranks", whole(1), "Number of ranks of the planned job; none is started.", default="1"
    )
    rank: int = option("--rank", whole(0), "Rank whose samples are shown.", default="0")
    epoch: int = option("--epoch", whole(1), "Epoch whose samples are shown, counted from 1.", default="1")
    head: int = option("--head", whole(0), "Number of samples to show.", default="10")
    division: Remainder = option(
        "--division",
        DIVISION,
        "Handling of samples that do not divide evenly among ranks.",
        default="rotate",
    )
    seed: int | None = option(
        "--seed", whole(0), "Seed for the sample order (default: the workload's train.seed)."
    )


@verb(_PlanOptions)
def plan(options: _PlanOptions, terminal: Terminal) -> None:
    """Show the first samples that a rank reads in an epoch, and their files.

    Takes no longer for large data sets: the order is computed, never stored.

    Examples:

      penstock training plan unet3d --ranks 8 --rank 3 --epoch 2

      penstock training plan resnet50_h100 --set dataset.num_files_train=50000000 --ranks 1024 --rank 7 --json
    """
    from penstock.bench.training.order_preview import preview_order

    loaded = options.workload.load(terminal, is_data_set=True)
    order = preview_order(
        loaded.workload,
        num_ranks=options.ranks,
        rank=options.rank,
        epoch=options.epoch,
        head=options.head,
        division=options.division,
        seed=loaded.workload.train.seed if options.seed is None else options.seed,
    )
    title = (
        f"Rank {options.rank} of {options.ranks} reads {order.num_samples:,} samples in epoch "
        f"{options.epoch}; the first"
    )
    rows = [{"sample": str(sample.index), "file": sample.file} for sample in order.samples]
    terminal.result(asdict(order), table(title, rows))


def _next_command(options: WorkloadOptions, required_size: DatasetSizing) -> str:
    """The command that makes this data set: the user's settings, secrets apart, then the computed ones."""
    from penstock.workload.overrides import parse_settings

    # An override's source has its secrets redacted, unlike the text that the user gave.
    changes = [override.source.removeprefix("--set ") for override in parse_settings(options.settings)]
    changes.append(f"dataset.num_files_train={required_size.min_files}")
    if required_size.num_subfolders:
        changes.append(f"dataset.num_subfolders_train={required_size.num_subfolders}")
    words = ["penstock", "training", "generate", options.name]
    words += ["--accelerator", options.accelerator] if options.accelerator else []
    words += [word for change in changes for word in ("--set", change)]
    return f"{shlex.join(words)} --data URI"


def _sizing_document(
    loaded: LoadedWorkload, required_size: DatasetSizing, verdict: SizeCheck, command: str
) -> dict[str, Any]:
    request = required_size.request
    return {
        "workload": loaded.workload.full_name,
        "accelerators": request.num_accelerators,
        "hosts": len(request.host_memory_bytes),
        "host_memory_bytes": list(request.host_memory_bytes),
        "record_bytes": float(request.record_bytes),
        "min_samples_by_steps": required_size.min_samples_by_steps,
        "min_samples_by_memory": required_size.min_samples_by_memory,
        "min_samples": required_size.min_samples,
        "num_files_train": required_size.min_files,
        "num_subfolders_train": required_size.num_subfolders,
        "dataset_bytes": required_size.dataset_bytes,
        "bytes_per_accelerator_per_s": _as_float(required_size.bytes_per_accelerator_per_s),
        "bytes_per_s": _as_float(required_size.bytes_per_s),
        "proof": list(required_size.proof),
        "as_configured": {
            "num_files_train": loaded.workload.dataset.num_files_train,
            "passed": verdict.passed,
            "proof": verdict.proof,
        },
        "next_command": command,
        "remarks": [str(remark) for remark in loaded.remarks],
    }


def _as_float(value: Fraction | None) -> float | None:
    return None if value is None else float(value)


def _draw_sizing(
    console: Console, workload: Workload, required_size: DatasetSizing, verdict: SizeCheck, command: str
) -> None:
    from rich.markup import escape

    from penstock.workload.dataset_size import describe_size

    folders = f" in {required_size.num_subfolders:,} subfolders" if required_size.num_subfolders else ""
    console.print(f"[bold]{escape(workload.full_name)}[/bold]")
    size_text = describe_size(required_size.dataset_bytes)
    console.print(f"  at least  {required_size.min_files:,} files{folders}, {size_text}")
    per_accelerator, in_all = required_size.bytes_per_accelerator_per_s, required_size.bytes_per_s
    if per_accelerator is not None and in_all is not None:
        rates = f"{format_rate(float(in_all))} at 100 %, {format_rate(float(per_accelerator))} an accelerator"
        console.print(f"  reads     {rates}")
    for line in required_size.proof:
        console.print(f"  proof     {escape(line)}")
    console.print(f"  as it is  {verdict.proof}: {'enough' if verdict.passed else 'too few'}")
    console.print(f"  next      {escape(command)}")


def _forecast_document(loaded: LoadedWorkload, prediction: AcceleratorForecast) -> dict[str, Any]:
    return {
        "workload": loaded.workload.full_name,
        "bandwidth_bytes_per_s": float(prediction.bandwidth_bytes_per_s),
        "accelerators": prediction.num_accelerators,
        "au": float(prediction.au),
        "au_with_one_more": float(prediction.au_with_one_more),
        "au_threshold": float(prediction.threshold),
        "step_read_bytes": float(prediction.step_read_bytes),
        "computation_s": float(prediction.computation_s),
        "bytes_per_accelerator_per_s": float(prediction.bytes_per_accelerator_per_s),
        "proof": list(prediction.proof),
        "remarks": [str(remark) for remark in loaded.remarks],
    }


def _draw_forecast(console: Console, workload: Workload, prediction: AcceleratorForecast) -> None:
    from rich.markup import escape

    rate = format_rate(float(prediction.bandwidth_bytes_per_s))
    console.print(f"[bold]{escape(workload.full_name)}[/bold]")
    console.print(f"  {rate} feeds {prediction.num_accelerators:,} of them")
    for line in prediction.proof:
        console.print(f"  proof     {escape(line)}")
