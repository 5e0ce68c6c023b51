"""DLIO's keys: aliases, keys that DLIO ignores or misreads, and keys that have no effect here.

These rules are applied after a layer is read and before `read_workload` is called. No key is dropped
silently: each becomes a value of the spec, a remark, or an error.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from penstock.errors import UsageError
from penstock.workload.entry_points import Extension
from penstock.workload.settings import LayeredSettings, Setting, dotted, flatten
from penstock.workload.spec import KeyPath


def _by_path(values: Mapping[str, Any]) -> dict[KeyPath, Any]:
    return {tuple(text.split(".")): value for text, value in values.items()}


SECTION_ALIASES: Final = {"data_reader": "reader"}

ALIASES: Final[Mapping[KeyPath, KeyPath]] = {
    path: tuple(ours.split("."))
    for path, ours in _by_path(
        {
            "dataset.record_length": "dataset.record_length_bytes",
            "dataset.record_length_stdev": "dataset.record_length_bytes_stdev",
            "dataset.record_length_resize": "dataset.record_length_bytes_resize",
            "model.model_size": "model.model_size_bytes",
            "checkpoint.model_size": "model.model_size_bytes",
            "train.computation_time_stdev": "train.computation_time.stdev",
            "evaluation.eval_time_stdev": "evaluation.eval_time.stdev",
            "reader.preprocess_time_stdev": "reader.preprocess_time.stdev",
            "storage.storage_options.storage_library": "storage.storage_library",
            "storage.storage_options.endpoint_uris": "storage.endpoint_uris",
            "storage.storage_options.endpoint_template": "storage.endpoint_uris",
            "storage.endpoint_template": "storage.endpoint_uris",
            "storage.s3_force_path_style": "storage.storage_options.s3_force_path_style",
            "reader.storage_library": "storage.storage_library",
            "reader.storage_root": "storage.storage_root",
            "reader.storage_type": "storage.storage_type",
        }
    ).items()
}
"""Other names, old or misplaced, that DLIO's files use for keys that Penstock supports."""

_ALIAS_REMARKS: Final = {
    "record_length": "DLIO reads only the key with _bytes and ignores this one; here both mean the same",
    "model_size": "DLIO ignores model_size and writes 10 KiB checkpoints; here it is model.model_size_bytes",
}
"""Remarks, by the beginning of the alias's last word, as in `record_length_stdev`."""

UNSET_BY_MINUS_ONE: Final[frozenset[KeyPath]] = frozenset(
    {
        ("train", "total_training_steps"),
        ("checkpoint", "steps_between_checkpoints"),
        ("checkpoint", "time_between_checkpoints"),
        ("checkpoint", "num_checkpoints_write"),
        ("checkpoint", "num_checkpoints_read"),
        ("model", "num_layers"),
        ("model", "parallelism", "data"),
    }
)
"""Keys for which DLIO writes -1 to leave them unset."""

_LISTS: Final[set[KeyPath]] = {("storage", "endpoint_uris"), ("profiling", "iostat_devices")}
"""Keys that also accept a single string for a list of one."""

_RANKS_DIFFER = "each rank begins with a different endpoint in any case"
_IN_TURN = "requests use the endpoints round-robin"
_S3DLIO = "this tunes internals of another reader; penstock's own takes prefetch_window and max_outstanding"
_LOG_LEVEL = "it selects a log level; give --debug to the command"
_HARNESS_LIMIT = "every run measures its harness limit on zero-cost storage"

EXPLAINED: Final[Mapping[KeyPath, str]] = _by_path(
    {
        "workflow.query": "it prints one value and stops; `penstock workloads NAME` prints them all",
        "workflow.debug": _LOG_LEVEL,
        "logging": _LOG_LEVEL,
        "dataset.data_gen_method": "there is one generator, at memory speed; nothing is left to choose",
        "dataset.record_element_bytes": "it follows from record_element_type",
        "dataset.files_pre_sharded": "no rank holds a list of files that could have been sharded before",
        "dataset.generation_buffer_size": "files are made front to back, in buffers of one size",
        "reader.data_loader_sampler": "samples are always found by number, in the order of the plan",
        "dataset.num_files_generated": "the data set's own manifest says how many files there are",
        "dataset.total_disk_bytes": "it is computed (penstock training size), never taken on trust",
        "dataset.parquet.use_s3dlio_gen": "there is one generator, at memory speed",
        "dataset.parquet.read_mode": "Parquet is always read by row group",
        "reader.dont_use_mmap": "files are never mapped, only read",
        "checkpoint.randomize_tensor": "content is always unique and cannot be deduplicated",
        "checkpoint.ksm": "content is unique, so the kernel has no equal pages to merge",
        "reader.seed": "train.seed decides the order of samples",
        "storage.use_mpi_endpoint_distribution": _RANKS_DIFFER,
        "storage.storage_options.use_mpi_endpoint_distribution": _RANKS_DIFFER,
        "storage.load_balance_strategy": _IN_TURN,
        "storage.storage_options.load_balance_strategy": _IN_TURN,
        "storage.storage_options.use_full_object_uri": "keys are always relative to the storage's root",
        "storage.storage_options.coalesce_rgs": _S3DLIO,
        "storage.storage_options.footer_cap": _S3DLIO,
        "storage.storage_options.footer_batch_size": _S3DLIO,
        "storage.storage_options.decode_output": _S3DLIO,
        "storage.storage_options.stagger_workers": _S3DLIO,
        "storage.storage_options.simulate_io": _HARNESS_LIMIT,
        "storage.storage_options.sim_log_secs": _HARNESS_LIMIT,
    }
)
"""Keys that are accepted but have no effect here, and why. A short path stands for a whole section."""

_CLASSES = (
    "classes are not loaded by name: install a package that offers yours as an entry point of the group "
)

REFUSED: Final[Mapping[KeyPath, str]] = _by_path(
    {
        "reader.data_loader_classname": (
            f"{_CLASSES}{Extension.LOADER}, and name it with `penstock training run --loader`"
        ),
        "reader.reader_classname": (
            f"{_CLASSES}{Extension.READER}, and name it with `penstock training run --reader`"
        ),
        "checkpoint.checkpoint_mechanism_classname": "other mechanisms cannot be used",
    }
)
"""Keys for which only null is accepted, with the reason."""

DEPARTURES: Final[Mapping[KeyPath, tuple[str, tuple[object, ...], str]]] = _by_path(
    {
        "dataset.compression": ("except", ("none",), "DLIO never compresses npz; here npz is compressed"),
        "dataset.enable_chunking": ("for", (True,), "DLIO ignores it; here HDF5 is chunked"),
        "dataset.chunk_size": ("except", (0,), "DLIO ignores it; here it sets the size of HDF5's chunks"),
        "dataset.listing_threads": ("except", (4,), "DLIO always uses 4; here as many as you ask for"),
        "reader.file_shuffle": (
            "for",
            ("off", False),
            "DLIO shuffles files in any case; here off means off",
        ),
        "reader.sample_shuffle": (
            "for",
            ("seed", "random"),
            "DLIO's PyTorch loader does not shuffle samples; here they are shuffled",
        ),
        "reader.read_type": (
            "for",
            ("on_demand",),
            "DLIO reads an explicit on_demand as memory; here samples are read on demand",
        ),
        "reader.file_access": ("except", ("multi",), "DLIO ignores it; here it is applied"),
        "reader.read_threads": ("for", (1,), "DLIO treats 1 as automatic; here it is one thread"),
        "reader.write_threads": ("for", (1,), "DLIO treats 1 as automatic; here it is one thread"),
        "checkpoint.type": ("except", ("rank_zero",), "DLIO ignores it; here it is applied"),
        "checkpoint.fsync": (
            "for",
            (True,),
            "DLIO never syncs; here every file is synced",
        ),
        "checkpoint.recovery_rank_shift": (
            "for",
            (True,),
            "DLIO ignores it; here ranks read what another node wrote",
        ),
        "storage.storage_type": ("for", ("parallel_fs",), "DLIO refuses it; here it is files"),
    }
)
"""Keys whose value DLIO ignores or misreads, for (or except for) the given values, and what is done here."""

_ONLY_WITH: Final[Mapping[KeyPath, tuple[KeyPath, str, str]]] = {
    ("dataset", "compression"): (("dataset", "format"), "tfrecord", "npz"),
    ("reader", "sample_shuffle"): (("reader", "data_loader"), "tensorflow", "pytorch"),
}
"""Departures that apply only if another key (with this default) has this value."""


def read_layer(tree: Mapping[str, Any], source: str) -> tuple[dict[KeyPath, Any], list[str]]:
    """Return one layer under canonical key names, and remarks. A wrapping `workload:` is removed."""
    inner = tree["workload"] if set(tree) == {"workload"} else tree
    values: dict[KeyPath, Any] = {}
    remarks = []
    for given, value in flatten(inner):
        path = canonical_path(given)
        if path in values:
            raise UsageError(
                f"{dotted(path)} is given twice, the second time as {dotted(given)}", where=source
            )
        if given in ALIASES:
            remarks += [
                f"{dotted(given)}: {text}"
                for word, text in _ALIAS_REMARKS.items()
                if given[-1].startswith(word)
            ]
        values[path] = value
    return values, remarks


def canonical_path(given: KeyPath) -> KeyPath:
    """Return the canonical name of the key that was given."""
    if given == ("model",):  # a bare `model: resnet50`
        return ("model", "name")
    section = (SECTION_ALIASES.get(given[0], given[0]), *given[1:])
    return ALIASES.get(section, section)


def canonical_values(tree: object) -> dict[KeyPath, Any]:
    """Return the values of a configuration by canonical key; empty unless the configuration is a mapping."""
    given = flatten(tree) if isinstance(tree, Mapping) else ()
    return {canonical_path(path): value for path, value in given}


def apply_dlio_rules(stack: LayeredSettings) -> tuple[list[str], list[tuple[KeyPath, str]]]:
    """Remove settings that have no effect here or are refused; return remarks, and each refusal by path.

    Remarks also say where DLIO treats a remaining value differently.
    """
    settings = stack.settings
    remarks: list[str] = []
    problems: list[tuple[KeyPath, str]] = []
    kind, library = ("storage", "storage_type"), ("storage", "storage_library")
    if (setting := settings.get(kind)) is not None and setting.value == "s3dlio":
        # Some files name the client library where others say that storage is S3.
        settings[kind] = replace(setting, value="s3")
        settings.setdefault(library, setting)
    for path in _LISTS & settings.keys():
        if isinstance(text := settings[path].value, str):
            settings[path] = replace(settings[path], value=[text])
    for path, setting in list(settings.items()):
        value = setting.value
        is_unset = value is None or (path in UNSET_BY_MINUS_ONE and value == -1)
        # If there are no workers, DLIO's own tests write None, which hydra reads as text.
        if is_unset or (path == ("reader", "multiprocessing_context") and value == "None"):
            del settings[path]
        elif reason := explanation(path):
            del settings[path]
            remarks.append(f"{dotted(path)}: accepted, without effect here: {reason}")
        elif path in REFUSED or (isinstance(value, str) and "${" in value):
            del settings[path]
            why = REFUSED.get(path, "interpolations are not resolved; write the value itself")
            problems.append((path, f"is {value!r}: {why}"))
        elif not setting.is_ours and path in DEPARTURES and _departs(path, value, settings):
            remarks.append(f"{dotted(path)}: {DEPARTURES[path][2]}")
    return remarks, problems


def _departs(path: KeyPath, value: object, settings: Mapping[KeyPath, Setting]) -> bool:
    """Return True if DLIO treats this value differently."""
    if path in _ONLY_WITH:
        other, default, needed = _ONLY_WITH[path]
        if (settings[other].value if other in settings else default) != needed:
            return False
    word, values, _ = DEPARTURES[path]
    return (value in values) is (word == "for")


def explanation(path: KeyPath) -> str:
    """Return the reason why the key at `path`, or its section, has no effect here; "" if it has an effect."""
    sections = (path[:length] for length in range(len(path), 0, -1))
    return next((EXPLAINED[section] for section in sections if section in EXPLAINED), "")
