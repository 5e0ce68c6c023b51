"""`penstock training size`, `whatif`, `plan`, `generate` and `verify`: the data set of a workload."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from penstock.cli.option_groups import DataOptions, WorkloadOptions, parse_overrides
from penstock.cli.options import group, option, required, verb
from penstock.cli.parsers import DIVISION, RATE, SIZE, number, several, whole
from penstock.cli.rank_options import ranked
from penstock.cli.terminal import Terminal, View, bold, table
from penstock.cluster.comm import Comm
from penstock.errors import UsageError
from penstock.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.bench.epoch_order import Remainder
    from penstock.dataset.dataset_manifest import DatasetRecipe
    from penstock.dataset.verify import VerificationResult
    from penstock.workload.load_workload import LoadedWorkload
    from penstock.workload.sizing import AcceleratorForecast, DatasetSizing
    from penstock.workload.spec import Workload


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """The data set: its place, and the settings that its bytes follow from."""

    workload: WorkloadOptions = group(WorkloadOptions)
    data: DataOptions = group(DataOptions)
    seed: int | None = option(
        "--seed", whole(0), "Seed of the contents (default: the workload's train.seed)."
    )
    threads: int = option("--threads", whole(1), "Maximum files in flight per rank.", default="4")
    compressible: float = option(
        "--compressible",
        number(0, 1),
        "Share of each 4 KiB block that is compressible, 0 to 1.",
        default="0.0",
    )

    def recipe(self, terminal: Terminal) -> DatasetRecipe:
        """The recipe of the data set; prints the workload's remarks."""
        from penstock.dataset.content import Reduction
        from penstock.dataset.dataset_manifest import DatasetRecipe

        workload = self.workload.load(terminal, is_data_set=True).workload
        return DatasetRecipe(
            dataset=workload.dataset,
            seed=workload.train.seed if self.seed is None else self.seed,
            reduction=Reduction(compressible=self.compressible),
        )


@ranked(DatasetOptions)
def generate(options: DatasetOptions, comm: Comm, terminal: Terminal) -> None:
    """Generate a workload's data set; run the same command again to continue after an interruption.

    Every byte follows from the seed, the file and the offset: contents are unique, incompressible unless
    asked otherwise, and verifiable without stored checksums. Files have DLIO's names.

    Examples:

      penstock training generate unet3d --data /data/unet3d --set dataset.num_files_train=40

      penstock training generate retinanet_b200 --data s3://bucket/retinanet --ranks 8 --threads 16
    """
    from penstock.dataset.generate import generate as generate_files

    recipe, storage, uri = options.recipe(terminal), options.data.opener(rank=comm.rank)(), options.data.uri
    with terminal.progress() as progress:
        report = generate_files(recipe, storage, comm=comm, threads=options.threads, progress=progress)
    text = (
        f"{report.num_files:,} files at {uri}: {report.written_files:,} written "
        f"({format_bytes(report.written_bytes)} in {format_seconds(report.elapsed_s)}, "
        f"{format_rate(report.rate_bytes_per_s)}), {report.kept_files:,} existed."
    )
    terminal.result(
        {"data": uri, **asdict(report), "rate_bytes_per_s": report.rate_bytes_per_s},
        [text],
    )


@ranked(DatasetOptions)
def verify(options: DatasetOptions, comm: Comm, terminal: Terminal) -> int:
    """Read a generated data set and compare every byte with its recipe; exits with 1 if a file is wrong.

    Give the options that the data set was generated with: its bytes follow from them alone.

    Examples:

      penstock training verify unet3d --data /data/unet3d --set dataset.num_files_train=40

      penstock training verify retinanet_b200 --data s3://bucket/retinanet --ranks 8 --json
    """
    from penstock.dataset.dataset_manifest import require_same
    from penstock.dataset.verify import verify as verify_files

    recipe, storage, uri = options.recipe(terminal), options.data.opener(rank=comm.rank)(), options.data.uri
    require_same(storage, recipe)
    with terminal.progress() as progress:
        report = verify_files(recipe, storage, comm=comm, threads=options.threads, progress=progress)
    terminal.result({"data": uri, **asdict(report)}, _view_verified(uri, report))
    return 1 if report.num_wrong else 0


def _view_verified(uri: str, report: VerificationResult) -> View:
    for file in report.wrong:
        yield f"{file.name}: {file.what}"
    if report.num_wrong > len(report.wrong):
        yield f"... and {report.num_wrong - len(report.wrong):,} more."
    yield (
        f"{report.num_files:,} files at {uri}, {format_bytes(report.read_bytes)} in "
        f"{format_seconds(report.elapsed_s)}: {report.num_wrong:,} wrong."
    )


@dataclass(frozen=True, kw_only=True)
class _SizeOptions:
    workload: WorkloadOptions = group(WorkloadOptions)
    accelerators: int = required("--accelerators", whole(1), "Number of accelerators, on all hosts together.")
    host_memory: tuple[int, ...] = required(
        "--host-memory",
        several(SIZE),
        "Memory of each host; one value if all hosts are equal.",
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
    from penstock.workload import sizing

    loaded = options.workload.load(terminal)
    stages = loaded.workload.workflow
    if stages.checkpoint and not (stages.train or stages.generate_data):
        raise UsageError(
            f"{loaded.workload.full_name} takes checkpoints and trains on no data set",
            where=options.workload.name,
            fix="`penstock checkpoint size` says how large its checkpoints are.",
        )
    request = sizing.make_sizing_request(
        loaded.workload, num_accelerators=options.accelerators, host_memory_bytes=options.memory_of_hosts
    )
    required_size = sizing.size_dataset(request)
    verdict = required_size.check_files(loaded.workload.dataset.num_files_train)
    command = _next_command(options.workload, required_size)
    terminal.result(
        _sizing_document(loaded, required_size, verdict, command),
        _view_sizing(loaded.workload, required_size, verdict, command),
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
    from penstock.workload.sizing import forecast_accelerators

    loaded = options.workload.load(terminal)
    prediction = forecast_accelerators(loaded.workload, Fraction(options.bandwidth))
    terminal.result(_forecast_document(loaded, prediction), _view_forecast(loaded.workload, prediction))


@dataclass(frozen=True, kw_only=True)
class _PlanOptions:
    workload: WorkloadOptions = group(WorkloadOptions)
    ranks: int = option("--ranks", whole(1), "Number of ranks; none is started.", default="1")
    rank: int = option("--rank", whole(0), "Rank whose samples are shown.", default="0")
    epoch: int = option("--epoch", whole(1), "Epoch, counted from 1.", default="1")
    head: int = option("--head", whole(0), "Number of samples to show.", default="10")
    division: Remainder = option(
        "--division",
        DIVISION,
        "What to do with samples that do not divide evenly among ranks.",
        default="rotate",
    )
    seed: int | None = option(
        "--seed", whole(0), "Seed of the sample order (default: the workload's train.seed)."
    )


@verb(_PlanOptions)
def plan(options: _PlanOptions, terminal: Terminal) -> None:
    """Show the first samples that a rank reads in an epoch, and their files.

    Takes no longer for large data sets: the order is computed, never stored.

    Examples:

      penstock training plan unet3d --ranks 8 --rank 3 --epoch 2

      penstock training plan resnet50_h100 --set dataset.num_files_train=50000000 --ranks 1024 --rank 7 --json
    """
    from penstock.bench.training.training_plan import preview_order

    loaded = options.workload.load(terminal, is_data_set=True)
    samples, num_samples = preview_order(
        loaded.workload,
        num_ranks=options.ranks,
        rank=options.rank,
        epoch=options.epoch,
        head=options.head,
        division=options.division,
        seed=loaded.workload.train.seed if options.seed is None else options.seed,
    )
    title = (
        f"Rank {options.rank} of {options.ranks} reads {num_samples:,} samples in epoch "
        f"{options.epoch}; the first"
    )
    document = {
        "samples": [{"index": index, "file": file} for index, file in samples],
        "num_samples": num_samples,
    }
    terminal.result(document, table(title, [{"sample": str(index), "file": file} for index, file in samples]))


def _next_command(options: WorkloadOptions, required_size: DatasetSizing) -> str:
    """The command that makes this data set: the user's settings, secrets apart, then the computed ones."""
    # An override's source has its secrets redacted, unlike the text that the user gave.
    changes = [override.source.removeprefix("--set ") for override in parse_overrides(options.settings)]
    changes.append(f"dataset.num_files_train={required_size.min_files}")
    if required_size.num_subfolders:
        changes.append(f"dataset.num_subfolders_train={required_size.num_subfolders}")
    words = ["penstock", "training", "generate", options.name]
    words += ["--accelerator", options.accelerator] if options.accelerator else []
    words += [word for change in changes for word in ("--set", change)]
    return f"{shlex.join(words)} --data URI"


def _sizing_document(
    loaded: LoadedWorkload, required_size: DatasetSizing, verdict: tuple[bool, str], command: str
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
            "passed": verdict[0],
            "proof": verdict[1],
        },
        "next_command": command,
        "remarks": list(loaded.remarks),
    }


def _as_float(value: Fraction | None) -> float | None:
    return None if value is None else float(value)


def _view_sizing(
    workload: Workload, required_size: DatasetSizing, verdict: tuple[bool, str], command: str
) -> View:
    folders = f" in {required_size.num_subfolders:,} subfolders" if required_size.num_subfolders else ""
    yield bold(workload.full_name)
    size_bytes = required_size.dataset_bytes
    size_text = f"{format_bytes(size_bytes)} ({size_bytes:,} B)"
    yield f"  at least  {required_size.min_files:,} files{folders}, {size_text}"
    per_accelerator, in_all = required_size.bytes_per_accelerator_per_s, required_size.bytes_per_s
    if per_accelerator is not None and in_all is not None:
        rates = f"{format_rate(float(in_all))} at 100 %, {format_rate(float(per_accelerator))} an accelerator"
        yield f"  reads     {rates}"
    for line in required_size.proof:
        yield f"  proof     {line}"
    passed, comparison = verdict
    yield f"  as it is  {comparison}: {'enough' if passed else 'too few'}"
    yield f"  next      {command}"


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
        "remarks": list(loaded.remarks),
    }


def _view_forecast(workload: Workload, prediction: AcceleratorForecast) -> View:
    rate = format_rate(float(prediction.bandwidth_bytes_per_s))
    yield bold(workload.full_name)
    yield f"  {rate} feeds {prediction.num_accelerators:,} accelerators"
    for line in prediction.proof:
        yield f"  proof     {line}"
