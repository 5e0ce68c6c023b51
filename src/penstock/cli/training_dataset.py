"""`penstock training size`, `whatif`, `plan`, `generate` and `verify`: the data set of a workload."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from penstock.cli.option_groups import DataOptions, WorkloadOptions, parse_overrides
from penstock.cli.options import group, option, required, verb
from penstock.cli.parsers import DIVISION, RATE, SIZE, number, several, whole
from penstock.cli.rank_options import ranked
from penstock.cli.terminal import Terminal, bold, table
from penstock.cluster.comm import Comm
from penstock.errors import UsageError
from penstock.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.bench.epoch_order import Remainder
    from penstock.dataset.dataset_manifest import DatasetRecipe

_PREVIEWED_SAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """The location of a data set, and the settings that determine its bytes."""

    workload: WorkloadOptions = group(WorkloadOptions)
    data: DataOptions = group(DataOptions)
    threads: int = option("--threads", whole(1), "Maximum files in flight per rank.", default="4")
    compressible: float = option(
        "--compressible",
        number(0, 1),
        "Compressible share of each 4 KiB block, 0 to 1.",
        default="0.0",
    )

    def recipe(self, terminal: Terminal) -> DatasetRecipe:
        """Make the recipe of the data set, and print the workload's remarks."""
        from penstock.dataset.content import Reduction
        from penstock.dataset.dataset_manifest import DatasetRecipe

        workload = self.workload.load(terminal, is_data_set=True).workload
        return DatasetRecipe(
            dataset=workload.dataset,
            seed=workload.train.seed,
            reduction=Reduction(compressible=self.compressible),
        )


@ranked
def generate(
    comm: Comm,
    terminal: Terminal,
    *,
    options: DatasetOptions = group(DatasetOptions),
) -> None:
    """Generate a workload's data set; run the same command again to continue after an interruption.

    Every byte is derived from the seed, the file and the offset: contents are unique, incompressible unless
    --compressible is given, and verifiable without stored checksums. Files are named as DLIO names them.

    Examples:

      penstock training generate unet3d --data /data/unet3d --set dataset.num_files_train=40

      penstock training generate retinanet_b200 --data s3://bucket/retinanet --ranks 8 --threads 16
    """
    from penstock.dataset.generate import generate as generate_files

    recipe, storage, uri = options.recipe(terminal), options.data.opener(rank=comm.rank)(), options.data.uri
    with terminal.progress() as progress:
        report = generate_files(recipe, storage, comm=comm, threads=options.threads, progress=progress)
    text = (
        f"{format_count(report.num_files, 'file')} at {uri}: {report.written_files:,} written "
        f"({format_bytes(report.written_bytes)} in {format_seconds(report.elapsed_s)}, "
        f"{format_rate(report.rate_bytes_per_s)}), {report.kept_files:,} existed."
    )
    terminal.result(
        {"data": uri, **asdict(report), "rate_bytes_per_s": report.rate_bytes_per_s},
        [text],
    )


@ranked
def verify(
    comm: Comm,
    terminal: Terminal,
    *,
    options: DatasetOptions = group(DatasetOptions),
) -> int:
    """Read a generated data set and compare every byte with the expected one; exit with 1 if any is wrong.

    Give the same options as to `generate`: the expected bytes are derived from them alone.

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
    lines = [f"{file.name}: {file.what}" for file in report.wrong]
    if report.num_wrong > len(report.wrong):
        lines.append(f"... and {report.num_wrong - len(report.wrong):,} more.")
    if report.num_wrong:
        lines.append(
            "`penstock training generate` keeps files that exist: delete the wrong ones, then run it with "
            "the same options."
        )
    lines.append(
        f"{format_count(report.num_files, 'file')} at {uri}, {format_bytes(report.read_bytes)} in "
        f"{format_seconds(report.elapsed_s)}: {report.num_wrong:,} wrong."
    )
    terminal.result({"data": uri, **asdict(report)}, lines)
    return 1 if report.num_wrong else 0


@verb
def size(
    terminal: Terminal,
    *,
    workload: WorkloadOptions = group(WorkloadOptions),
    accelerators: int = required("--accelerators", whole(1), "Total number of accelerators on all hosts."),
    host_memory: tuple[int, ...] = required(
        "--host-memory",
        several(SIZE),
        "Memory of each host; a single value applies to all hosts.",
    ),
    hosts: int | None = option(
        "--hosts", whole(1), "Number of hosts (default: the number of values of --host-memory)."
    ),
) -> None:
    """Calculate the minimum size of a data set, show the calculation, and print the command to generate it.

    The data set must be large enough for 500 steps per accelerator, and at least five times as large as the
    memory of all hosts together.

    Examples:

      penstock training size unet3d --accelerator h100 --accelerators 8 --hosts 2 --host-memory 512GiB

      penstock training size retinanet_b200 --accelerators 4 --host-memory 256GiB,512GiB --json
    """
    from penstock.workload import sizing

    memory_of_hosts = host_memory
    if len(host_memory) == 1:
        memory_of_hosts = host_memory * (hosts or 1)
    elif hosts not in (None, len(host_memory)):
        raise UsageError(
            f"{len(host_memory)} memory sizes for {format_count(hosts, 'host')}",
            where="--host-memory",
            fix="Give one value, or one for each host.",
        )
    loaded = workload.load(terminal)
    unequal = (
        f"{format_count(accelerators, 'accelerator')} on {format_count(len(memory_of_hosts), 'host')}: "
        "in a submission, every host must "
        "have the same number (hosts.equal)"
    )
    remarks = [unequal] * bool(accelerators % len(memory_of_hosts))
    terminal.notes(remarks)
    stages = loaded.workload.workflow
    if stages.checkpoint and not (stages.train or stages.generate_data):
        raise UsageError(
            f"{loaded.workload.full_name} takes checkpoints and trains on no data set",
            where=workload.name,
            fix="`penstock checkpoint size` says how large its checkpoints are.",
        )
    request = sizing.make_sizing_request(
        loaded.workload, num_accelerators=accelerators, host_memory_bytes=memory_of_hosts
    )
    sized = sizing.size_dataset(request)
    is_enough, comparison = sized.check_files(loaded.workload.dataset.num_files_train)
    # The command that generates this data set. The source of an override has its secrets redacted, unlike the
    # text that the user gave.
    changes = [override.source.removeprefix("--set ") for override in parse_overrides(workload.settings)]
    changes.append(f"dataset.num_files_train={sized.min_files}")
    if sized.num_subfolders:
        changes.append(f"dataset.num_subfolders_train={sized.num_subfolders}")
    words = ["penstock", "training", "generate", workload.name]
    words += ["--accelerator", workload.accelerator] if workload.accelerator else []
    words += [word for change in changes for word in ("--set", change)]
    command = f"{shlex.join(words)} --data URI"
    folders = f" in {sized.num_subfolders:,} subfolders" if sized.num_subfolders else ""
    rate = None if sized.bytes_per_s is None else float(sized.bytes_per_s)
    each = None if sized.bytes_per_accelerator_per_s is None else float(sized.bytes_per_accelerator_per_s)
    document = {
        "workload": loaded.workload.full_name,
        "accelerators": request.num_accelerators,
        "hosts": len(request.host_memory_bytes),
        "host_memory_bytes": list(request.host_memory_bytes),
        "record_bytes": float(request.record_bytes),
        "min_samples_by_steps": sized.min_samples_by_steps,
        "min_samples_by_memory": sized.min_samples_by_memory,
        "min_samples": sized.min_samples,
        "num_files_train": sized.min_files,
        "num_subfolders_train": sized.num_subfolders,
        "dataset_bytes": sized.dataset_bytes,
        "bytes_per_accelerator_per_s": each,
        "bytes_per_s": rate,
        "proof": list(sized.proof),
        "as_configured": {
            "num_files_train": loaded.workload.dataset.num_files_train,
            "passed": is_enough,
            "proof": comparison,
        },
        "next_command": command,
        "remarks": [*loaded.remarks, *remarks],
    }
    size_text = f"{format_bytes(sized.dataset_bytes, at_least=True)} ({sized.dataset_bytes:,} B)"
    lines = [
        bold(loaded.workload.full_name),
        f"  at least  {format_count(sized.min_files, 'file')}{folders}, {size_text}",
    ]
    if rate is not None and each is not None:
        all_of_them, one = (format_rate(needed, at_least=True) for needed in (rate, each))
        lines.append(f"  reads     {all_of_them} at 100 %, {one} an accelerator")
    lines += [f"  proof     {line}" for line in sized.proof]
    lines.append(f"  as it is  {comparison}: {'enough' if is_enough else 'too few'}")
    lines.append(f"  next      {command}")
    terminal.result(document, lines)


@verb
def whatif(
    terminal: Terminal,
    *,
    workload: WorkloadOptions = group(WorkloadOptions),
    bandwidth: float = required("--bandwidth", RATE, "Read bandwidth of the storage, e.g. 40GiB/s."),
) -> None:
    """Calculate how many accelerators a read bandwidth can feed, and show the calculation.

    Examples:

      penstock training whatif unet3d --accelerator h100 --bandwidth 40GiB/s

      penstock training whatif dlrm_b200 --bandwidth 100GB/s --json
    """
    from penstock.workload.sizing import forecast_accelerators

    loaded = workload.load(terminal)
    prediction = forecast_accelerators(loaded.workload, Fraction(bandwidth))
    terminal.result(
        {
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
        },
        [
            bold(loaded.workload.full_name),
            f"  {format_rate(bandwidth)} feeds {format_count(prediction.num_accelerators, 'accelerator')}",
            *(f"  proof     {line}" for line in prediction.proof),
        ],
    )


@verb
def plan(
    terminal: Terminal,
    *,
    workload: WorkloadOptions = group(WorkloadOptions),
    ranks: int = option("--ranks", whole(1), "Number of ranks to plan for; none is started.", default="1"),
    rank: int = option("--rank", whole(0), "Show the samples of this rank.", default="0"),
    epoch: int = option("--epoch", whole(1), "Show this epoch; the first is 1.", default="1"),
    remainder: Remainder = option(
        "--remainder",
        DIVISION,
        "If samples do not divide evenly among ranks, skip different ones each epoch (rotate), skip the last "
        "(drop), repeat the first (pad) or fail (error).",
        default="rotate",
    ),
) -> None:
    """Show the first samples that a rank reads in an epoch, and their files.

    The order is computed, never stored, so this takes no longer for large data sets.

    Examples:

      penstock training plan unet3d --ranks 8 --rank 3 --epoch 2

      penstock training plan resnet50_h100 --set dataset.num_files_train=50000000 --ranks 1024 --rank 7 --json
    """
    from penstock.bench.training.training_plan import preview_order

    loaded = workload.load(terminal, is_data_set=True)
    samples, num_samples = preview_order(
        loaded.workload,
        num_ranks=ranks,
        rank=rank,
        epoch=epoch,
        head=_PREVIEWED_SAMPLES,
        division=remainder,
        seed=loaded.workload.train.seed,
    )
    title = f"Rank {rank} of {ranks} reads {num_samples:,} samples in epoch {epoch}; the first"
    document = {
        "samples": [{"index": index, "file": file} for index, file in samples],
        "num_samples": num_samples,
    }
    terminal.result(document, table(title, [{"sample": str(index), "file": file} for index, file in samples]))
