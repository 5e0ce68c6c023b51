"""Loaders feed batches to a rank: native threads, torch's DataLoader, or a loader from an extension."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from penstock.bench.loader.native_loader import NativeOptions
from penstock.optional_libraries import explained_imports
from penstock.workload import entry_points, enums, quantities

if TYPE_CHECKING:
    from penstock.bench.loader.loader_protocol import LoaderOptions
    from penstock.workload.spec import Workload


def loader_options(name: str, workload: Workload, threads: int | None) -> LoaderOptions:
    """Return the options of the loader of this name, as the workload and `threads` set them."""
    reader, dataset = workload.reader, workload.dataset
    if name == "pytorch":
        with explained_imports():
            from penstock.bench.loader.pytorch_loader import PytorchOptions  # noqa: PLC0415 - needs torch
        # One worker for each read in flight; none if the workload has `read_threads: 0`.
        workers = reader.read_threads if threads is None else threads
        dims, element = reader.transformed_record_dims, reader.transformed_record_element_type
        transformed_bytes = prod(dims) * quantities.element_bytes(element) if dims else 0
        stored_bytes = int(dataset.record_length_bytes_resize or dataset.record_length_bytes)
        return PytorchOptions(
            workers=NativeOptions().threads if workers is None else workers,
            sample_bytes=max(1, transformed_bytes or stored_bytes),
            prefetch_batches=reader.prefetch_size,
            context=reader.multiprocessing_context,
            pin_memory=reader.pin_memory,
        )
    if name != "native":
        extension = entry_points.load_extension(
            entry_points.Extension.LOADER, name, where="--loader", own=("native", "pytorch")
        )
        options: LoaderOptions = extension(workload, threads)
        return options
    # Only TensorFlow preprocesses in separate threads; with other loaders, the reading threads preprocess,
    # too.
    is_tensorflow = reader.data_loader is enums.LoaderKind.TENSORFLOW and not reader.preprocess_time.is_zero
    return NativeOptions(
        threads=threads or reader.read_threads or NativeOptions().threads,
        prefetch_batches=reader.prefetch_size,
        preprocess_threads=reader.computation_threads if is_tensorflow else None,
    )
