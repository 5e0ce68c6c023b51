"""DLIO's keys: aliases, keys that DLIO ignores or misreads, and keys without effect here.

Between reading a layer and `workload_schema`. No key is dropped silently: it becomes a value of the spec, a
remark, or an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.errors import UsageError
from penstock.workload.entry_points import Extension
from penstock.workload.layered_settings import KeyPath, LayeredSettings, SettingProblem, dotted, flatten


@dataclass(frozen=True, slots=True)
class Remark:
    """Something a user of DLIO should know about the value at `path`, said once."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def _path(text: str) -> KeyPath:
    return tuple(text.split("."))


def _paths(texts: Mapping[str, str]) -> dict[KeyPath, KeyPath]:
    return {_path(other): _path(ours) for other, ours in texts.items()}


def _paths_to(values: Mapping[str, object]) -> dict[KeyPath, object]:
    return {_path(text): value for text, value in values.items()}


SECTION_ALIASES: Final = {"data_reader": "reader"}

ALIASES: Final = _paths(
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
)
"""Other words of DLIO's files, old or misplaced, for keys that we know."""

_RECORD_LENGTH = "DLIO reads only the key with _bytes and ignores this one; here both mean the same"
_MODEL_SIZE = "DLIO ignores model_size and writes 10 KiB checkpoints; here it is model.model_size_bytes"

_ALIAS_REMARKS: Final = {
    _path("dataset.record_length"): _RECORD_LENGTH,
    _path("dataset.record_length_stdev"): _RECORD_LENGTH,
    _path("dataset.record_length_resize"): _RECORD_LENGTH,
    _path("model.model_size"): _MODEL_SIZE,
    _path("checkpoint.model_size"): _MODEL_SIZE,
}

UNSET_BY_MINUS_ONE: Final = frozenset(
    _path(text)
    for text in (
        "train.total_training_steps",
        "checkpoint.steps_between_checkpoints",
        "checkpoint.time_between_checkpoints",
        "checkpoint.num_checkpoints_write",
        "checkpoint.num_checkpoints_read",
        "model.num_layers",
        "model.parallelism.data",
    )
)
"""Keys for which DLIO writes -1 to leave them unset."""

_RANKS_DIFFER = "each rank begins with another endpoint in any case"
_IN_TURN = "requests take the endpoints in turn"
_S3DLIO = "this tunes the inside of another reader; penstock's own takes prefetch_window and max_outstanding"

_LISTS: Final = {_path("storage.endpoint_uris"), _path("profiling.iostat_devices")}
"""Keys for which one text stands for a list of one."""

EXPLAINED: Final = {
    _path("workflow.query"): "it prints one value and stops; `penstock workloads NAME` prints them all",
    _path("workflow.debug"): "it selects a log level; give --debug to the command",
    _path("logging"): "it selects a log level; give --debug to the command",
    _path("dataset.data_gen_method"): "there is one generator, at memory speed; nothing is left to choose",
    _path("dataset.record_element_bytes"): "it follows from record_element_type",
    _path("dataset.files_pre_sharded"): "no rank holds a list of files that could have been sharded before",
    _path("dataset.generation_buffer_size"): "files are made front to back, in buffers of one size",
    _path("reader.data_loader_sampler"): "samples are always found by number, in the order of the plan",
    _path("dataset.num_files_generated"): "the data set's own manifest says how many files there are",
    _path("dataset.total_disk_bytes"): "it is computed (penstock training size), never taken on trust",
    _path("dataset.parquet.use_s3dlio_gen"): "there is one generator, at memory speed",
    _path("dataset.parquet.read_mode"): "Parquet is always read by row group",
    _path("reader.dont_use_mmap"): "files are never mapped, only read",
    _path("checkpoint.randomize_tensor"): "content is always unique and cannot be deduplicated",
    _path("checkpoint.ksm"): "content is unique, so the kernel has no equal pages to merge",
    _path("reader.seed"): "train.seed decides the order of samples",
    _path("storage.use_mpi_endpoint_distribution"): _RANKS_DIFFER,
    _path("storage.storage_options.use_mpi_endpoint_distribution"): _RANKS_DIFFER,
    _path("storage.load_balance_strategy"): _IN_TURN,
    _path("storage.storage_options.load_balance_strategy"): _IN_TURN,
    _path("storage.storage_options.use_full_object_uri"): "keys are always relative to the storage's root",
    _path("storage.storage_options.coalesce_rgs"): _S3DLIO,
    _path("storage.storage_options.footer_cap"): _S3DLIO,
    _path("storage.storage_options.footer_batch_size"): _S3DLIO,
    _path("storage.storage_options.decode_output"): _S3DLIO,
    _path("storage.storage_options.stagger_workers"): _S3DLIO,
    _path("storage.storage_options.simulate_io"): "every run measures its harness limit on zero-cost storage",
    _path(
        "storage.storage_options.sim_log_secs"
    ): "every run measures its harness limit on zero-cost storage",
}
"""Keys that are accepted, mean nothing here, and why; a whole section where its path is short."""

_CLASSES = (
    "classes are not loaded by name: install a package that offers yours as an entry point of the group "
)

REFUSED: Final = {
    _path("reader.data_loader_classname"): (
        f"{_CLASSES}{Extension.LOADER}, and name it with `penstock training run --loader`"
    ),
    _path("reader.reader_classname"): (
        f"{_CLASSES}{Extension.READER}, and name it with `penstock training run --reader`"
    ),
    _path("checkpoint.checkpoint_mechanism_classname"): f"{_CLASSES}{Extension.CHECKPOINT_MECHANISM}",
}
"""Keys that only null is accepted for, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DlioDifference:
    """What DLIO does otherwise, for the values `shown_for`, or for all but those it is `hidden_for`."""

    text: str
    shown_for: tuple[object, ...] = ()
    hidden_for: tuple[object, ...] = ()
    only_with: tuple[KeyPath, object] | None = None
    """Another key and the value of it without which DLIO does no otherwise."""

    def shows(self, value: object, stack: LayeredSettings) -> bool:
        """Whether DLIO does otherwise for this value."""
        if self.only_with is not None:
            path, needed = self.only_with
            other = stack.settings.get(path)
            if (other.value if other else DLIO_DEFAULTS.get(path)) != needed:
                return False
        return value in self.shown_for if self.shown_for else value not in self.hidden_for


DLIO_DEFAULTS: Final = _paths_to({"dataset.format": "tfrecord", "reader.data_loader": "tensorflow"})
"""What these keys are where a workload does not say."""


DEPARTURES: Final = {
    _path("dataset.compression"): DlioDifference(
        hidden_for=("none",),
        text="DLIO never compresses npz; here it compresses",
        only_with=(_path("dataset.format"), "npz"),
    ),
    _path("dataset.enable_chunking"): DlioDifference(
        shown_for=(True,), text="DLIO ignores it; here HDF5 is chunked"
    ),
    _path("dataset.chunk_size"): DlioDifference(
        hidden_for=(0,), text="DLIO ignores it; here it is the size of HDF5's chunks"
    ),
    _path("dataset.listing_threads"): DlioDifference(
        hidden_for=(4,), text="DLIO always takes 4; here as many as asked for"
    ),
    _path("reader.file_shuffle"): DlioDifference(
        shown_for=("off", False), text="DLIO shuffles files whatever is written here; here off is off"
    ),
    _path("reader.sample_shuffle"): DlioDifference(
        shown_for=("seed", "random"),
        text="DLIO's PyTorch loader leaves samples in order; here they are shuffled",
        only_with=(_path("reader.data_loader"), "pytorch"),
    ),
    _path("reader.read_type"): DlioDifference(
        shown_for=("on_demand",),
        text="DLIO takes an explicit on_demand for memory; here samples are read on demand",
    ),
    _path("reader.file_access"): DlioDifference(
        hidden_for=("multi",), text="DLIO ignores it; here it is honoured"
    ),
    _path("reader.read_threads"): DlioDifference(
        shown_for=(1,), text="DLIO takes 1 for automatic; here it is one thread"
    ),
    _path("reader.write_threads"): DlioDifference(
        shown_for=(1,), text="DLIO takes 1 for automatic; here it is one thread"
    ),
    _path("checkpoint.type"): DlioDifference(
        hidden_for=("rank_zero",), text="DLIO ignores it; here it is honoured"
    ),
    _path("checkpoint.fsync"): DlioDifference(
        shown_for=(True,), text="DLIO never syncs, whatever is asked; here every file is synced"
    ),
    _path("checkpoint.recovery_rank_shift"): DlioDifference(
        shown_for=(True,), text="DLIO ignores it; here ranks read what another node wrote"
    ),
    _path("storage.storage_type"): DlioDifference(
        shown_for=("parallel_fs",), text="DLIO refuses it; here it is files"
    ),
}
"""Keys that DLIO ignores or misreads: for which values that shows, and what is done here."""


def read_layer(tree: Mapping[str, Any], source: str) -> tuple[dict[KeyPath, Any], list[Remark]]:
    """One layer under the names that we use. A wrapping `workload:` is taken off, as in a resolved file."""
    inner = tree["workload"] if set(tree) == {"workload"} else tree
    values: dict[KeyPath, Any] = {}
    remarks = []
    for given, value in flatten(inner):
        path = canonical_path(given)
        if path in values:
            raise UsageError(
                f"{dotted(path)} is given twice, the second time as {dotted(given)}", where=source
            )
        if given in _ALIAS_REMARKS:
            remarks.append(Remark(dotted(given), _ALIAS_REMARKS[given]))
        values[path] = value
    return values, remarks


def canonical_path(given: KeyPath) -> KeyPath:
    """The key that we know by the one that was given."""
    if given == ("model",):  # a bare `model: resnet50`
        return ("model", "name")
    section = (SECTION_ALIASES.get(given[0], given[0]), *given[1:])
    return ALIASES.get(section, section)


def canonical_values(tree: object) -> dict[KeyPath, Any]:
    """The values of a configuration by the keys that we know; none of what is no mapping."""
    given = flatten(tree) if isinstance(tree, Mapping) else ()
    return {canonical_path(path): value for path, value in given}


def apply_dlio_rules(stack: LayeredSettings) -> tuple[list[Remark], list[SettingProblem]]:
    """Take out of `stack` what means nothing here or asks for nothing; say so, and what is refused.

    Remarks also say where DLIO treats a value that stays differently.
    """
    remarks: list[Remark] = []
    problems: list[SettingProblem] = []
    _split_storage_type(stack)
    for path in _LISTS & stack.settings.keys():
        setting = stack.settings[path]
        if isinstance(setting.value, str):
            stack.settings[path] = replace(setting, value=[setting.value])
    for path, setting in list(stack.settings.items()):
        is_unset = setting.value is None or (path in UNSET_BY_MINUS_ONE and setting.value == -1)
        # Without workers DLIO's own tests say None, which hydra reads as text.
        if is_unset or (path == _path("reader.multiprocessing_context") and setting.value == "None"):
            del stack.settings[path]
        elif reason := explanation(path):
            del stack.settings[path]
            remarks.append(Remark(dotted(path), f"accepted, without effect here: {reason}"))
        elif refusal := _refusal(path, setting.value):
            del stack.settings[path]
            problems.append(SettingProblem(path=path, kind="refused", text=refusal))
        elif not setting.is_ours and path in DEPARTURES and DEPARTURES[path].shows(setting.value, stack):
            remarks.append(Remark(dotted(path), DEPARTURES[path].text))
    return remarks, problems


def _split_storage_type(stack: LayeredSettings) -> None:
    """Some files name the client library where others say that storage is S3."""
    kind, library = _path("storage.storage_type"), _path("storage.storage_library")
    setting = stack.settings.get(kind)
    if setting is not None and setting.value == "s3dlio":
        stack.settings[kind] = replace(setting, value="s3")
        stack.settings.setdefault(library, setting)


def explanation(path: KeyPath) -> str:
    """Why the key at `path`, or its section, means nothing here; "" if it does mean something."""
    sections = (path[:length] for length in range(len(path), 0, -1))
    return next((EXPLAINED[section] for section in sections if section in EXPLAINED), "")


def _refusal(path: KeyPath, value: object) -> str:
    if path in REFUSED:
        return f"is {value!r}: {REFUSED[path]}"
    if isinstance(value, str) and "${" in value:
        return f"is {value!r}: interpolations are not resolved; write the value itself"
    return ""
