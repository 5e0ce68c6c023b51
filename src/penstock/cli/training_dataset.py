"""`penstock training generate` and `verify`: make a workload's data set, and compare it with its recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from penstock.cli.option_groups import DataOptions, WorkloadOptions
from penstock.cli.options import group, option
from penstock.cli.parsers import number, whole
from penstock.cli.rank_options import ranked
from penstock.cli.terminal import Terminal
from penstock.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cluster.comm import Comm
    from penstock.dataset.dataset_manifest import DatasetRecipe
    from penstock.dataset.verify_dataset import VerificationResult


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """What a data set's bytes follow from, and where they are."""

    workload: WorkloadOptions = group(WorkloadOptions)
    data: DataOptions = group(DataOptions)
    seed: int | None = option(
        "--seed", whole(0), "Seed for the contents (default: the workload's train.seed)."
    )
    threads: int = option("--threads", whole(1), "Files in flight on each rank.", default="4")
    compressible: float = option(
        "--compressible", number(0, 1), "Compressible share of each 4 KiB block.", default="0.0"
    )
    dedupable: float = option(
        "--dedupable", number(0, 1), "Share of 4 KiB blocks that are duplicates.", default="0.0"
    )

    def recipe(self, terminal: Terminal) -> DatasetRecipe:
        """The recipe of the data set; prints the workload's remarks."""
        from penstock.dataset.content import Reduction
        from penstock.dataset.dataset_manifest import DatasetRecipe

        workload = self.workload.load(terminal, is_data_set=True).workload
        return DatasetRecipe(
            dataset=workload.dataset,
            seed=workload.train.seed if self.seed is None else self.seed,
            reduction=Reduction(compressible=self.compressible, dedupable=self.dedupable),
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
    terminal.result(
        {"data": uri, **asdict(report), "rate_bytes_per_s": report.rate_bytes_per_s},
        lambda console: console.print(
            f"{report.num_files:,} files at {uri}: {report.written_files:,} written "
            f"({format_bytes(report.written_bytes)} in {format_seconds(report.elapsed_s)}, "
            f"{format_rate(report.rate_bytes_per_s)}), {report.kept_files:,} existed."
        ),
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
    from penstock.dataset.verify_dataset import verify as verify_files

    recipe, storage, uri = options.recipe(terminal), options.data.opener(rank=comm.rank)(), options.data.uri
    require_same(storage, recipe)
    with terminal.progress() as progress:
        report = verify_files(recipe, storage, comm=comm, threads=options.threads, progress=progress)
    terminal.result({"data": uri, **asdict(report)}, lambda console: _draw_verified(console, uri, report))
    return 1 if report.num_wrong else 0


def _draw_verified(console: Console, uri: str, report: VerificationResult) -> None:
    from rich.markup import escape

    for file in report.wrong:
        console.print(escape(f"{file.name}: {file.what}"))
    if report.num_wrong > len(report.wrong):
        console.print(f"... and {report.num_wrong - len(report.wrong):,} more.")
    console.print(
        f"{report.num_files:,} files at {escape(uri)}, {format_bytes(report.read_bytes)} in "
        f"{format_seconds(report.elapsed_s)}: {report.num_wrong:,} wrong."
    )
