"""How a run reads: the loader that a name stands for, the seed of its order, and what it leaves undone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cli import values

if TYPE_CHECKING:
    from penstock.bench.epoch_order import Division
    from penstock.bench.loader.loader_protocol import LoaderOptions
    from penstock.bench.loader.pytorch_loader import PytorchOptions
    from penstock.bench.training.training_files import OpenFormat
    from penstock.cluster.comm import Comm
    from penstock.workload.division_rules import SubmissionDivision
    from penstock.workload.spec import Reader, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingRules:
    """Who reads, and what happens to what does not divide evenly."""

    loader: str
    division: Division


def open_rules(loader: str | None, division: str | None) -> ReadingRules:
    """What was asked for; our own loader, and no sample left out for long."""
    return ReadingRules(
        loader=loader or "native", division=values.division("--division", division or "rotate")
    )


def rules_of(
    submitted: SubmissionDivision | None,
    name: str,
    settings: list[str] | None,
    loader: str | None,
    division: str | None,
) -> ReadingRules:
    """How a run of this division of MLPerf Storage reads; of none, as it was asked for."""
    from penstock.workload.division_rules import SubmissionDivision

    if submitted is SubmissionDivision.CLOSED:
        return closed_rules(name, settings, loader, division)
    if submitted is SubmissionDivision.OPEN:
        _require_changes(submitted, name, settings)
    return open_rules(loader, division)


def closed_rules(
    name: str, settings: list[str] | None, loader: str | None, division: str | None
) -> ReadingRules:
    """What the closed division prescribes; `UsageError` where something else was asked for."""
    from penstock.errors import UsageError
    from penstock.workload.division_rules import SubmissionDivision

    _require_changes(SubmissionDivision.CLOSED, name, settings)
    for option, given, prescribed in (("--loader", loader, "pytorch"), ("--division", division, "drop")):
        if given not in (None, prescribed):
            raise UsageError(
                f"The closed division reads with {option} {prescribed}, not {given} (rule 3.6.2)",
                where=option,
                fix=f"Leave {option} out, or run without --closed.",
            )
    return ReadingRules(loader="pytorch", division=values.division("--division", "drop"))


def _require_changes(submitted: SubmissionDivision, name: str, settings: list[str] | None) -> None:
    """`UsageError` unless the division lets this workload be changed so."""
    from penstock.errors import UsageError
    from penstock.workload.division_rules import RULES, require_allowed
    from penstock.workload.loading import shipped
    from penstock.workload.overrides import parse_settings

    families = {loaded.workload.name for loaded in shipped()}
    family = name.rpartition("_")[0] if name not in families else name
    if family not in families:
        raise UsageError(
            f"{name} is no shipped workload, and the {submitted} division has no other "
            f"(rule {RULES[submitted]})",
            where=f"--{submitted}",
            fix="`penstock workloads` lists them.",
        )
    changed = [override.path for override in parse_settings(settings or ())]
    require_allowed(submitted, changed, workload=family)


def loader_options(name: str, workload: Workload, threads: int | None) -> LoaderOptions:
    """The loader of this name as the workload and `--threads` ask for it."""
    from penstock.bench.loader.native_loader import NativeOptions
    from penstock.workload.choices import LoaderKind
    from penstock.workload.extensions import Extension, load_extension

    if name == "pytorch":
        return _pytorch_options(workload, threads)
    if name != "native":
        extension = load_extension(Extension.LOADER, name, where="--loader", own=("native", "pytorch"))
        options: LoaderOptions = extension(workload, threads)
        return options
    reader = workload.reader
    # TensorFlow alone has threads of their own for it; everywhere else those that read work on samples, too.
    is_tensorflow = reader.data_loader is LoaderKind.TENSORFLOW and not reader.preprocess_time.is_zero
    return NativeOptions(
        threads=threads or reader.read_threads or NativeOptions().threads,
        prefetch_batches=reader.prefetch_size,
        preprocess_threads=reader.computation_threads if is_tensorflow else None,
    )


def _pytorch_options(workload: Workload, threads: int | None) -> PytorchOptions:
    """One worker for each read in flight; none where the workload says `read_threads: 0`."""
    from penstock.bench.loader.native_loader import NativeOptions
    from penstock.errors import Unavailable

    try:
        from penstock.bench.loader.pytorch_loader import PytorchOptions
    except ImportError as error:
        raise Unavailable(
            "The pytorch loader needs torch", where="--loader", fix="pip install 'penstock[torch]'"
        ) from error
    reader, dataset = workload.reader, workload.dataset
    workers = reader.read_threads if threads is None else threads
    return PytorchOptions(
        workers=NativeOptions().threads if workers is None else workers,
        sample_bytes=max(
            1,
            _transformed_bytes(reader)
            or int(dataset.record_length_bytes_resize or dataset.record_length_bytes),
        ),
        prefetch_batches=reader.prefetch_size,
        context=reader.multiprocessing_context,
        pin_memory=reader.pin_memory,
    )


def _transformed_bytes(reader: Reader) -> int:
    """A sample's size when it arrives, where the workload says its shape; else 0."""
    from math import prod

    from penstock.workload.values import element_bytes

    dims = reader.transformed_record_dims
    return prod(dims) * element_bytes(reader.transformed_record_element_type) if dims else 0


def choose_seed(comm: Comm, workload: Workload, asked: int | None) -> int:
    """The seed that was asked for, or a new one where the workload's shuffling is to be random."""
    import secrets

    from penstock.workload.choices import Shuffle

    if asked is not None:
        return asked
    if Shuffle.RANDOM in (workload.reader.file_shuffle, workload.reader.sample_shuffle):
        return comm.broadcast(secrets.randbits(31), awaiting="rank 0 to draw a seed")
    return workload.train.seed


def reader_of(name: str | None) -> OpenFormat | None:
    """The reader of another package; None where files are of a format of ours."""
    from penstock.workload.extensions import Extension, load_extension

    if name is None:
        return None
    reader: OpenFormat = load_extension(Extension.READER, name, where="--reader")
    return reader


def asks_to_decode(workload: Workload) -> bool:
    """Whether DLIO's own key asks for samples to be decoded."""
    from penstock.workload.choices import Decode

    return workload.storage.storage_options.decode is Decode.ARROW


def left_undone(workload: Workload) -> tuple[str, ...]:
    """What the workload asks for and this command does not do: said once, and recorded."""
    profiling = workload.profiling
    of_devices = f" of {', '.join(profiling.iostat_devices)}" if profiling.iostat_devices else ""
    undone = {
        f"workflow.profiling: {profiling.profiler}{of_devices} is not started, nothing observes the run from "
        "outside": workload.workflow.profiling,
    }
    return tuple(text for text, is_asked in undone.items() if is_asked)
