"""A workload as typed data: one frozen dataclass per section, with DLIO's defaults.

Types tell `read_workload` and `write_workload` how to read and write a value; the constructors check nothing.
A spec never changes: an override creates a new one. Units are part of the names; an alias is DLIO's key
where that differs. `read_workload` turns what `write_workload` prints into an equal workload, except for
secrets.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, ClassVar, Final, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo

from penstock.workload import enums, quantities

KeyPath = tuple[str, ...]
"""The path of a value: `("dataset", "num_files_train")`."""


Integer = Annotated[int, Strict(), Le(quantities.LARGEST)]
Count = Annotated[Integer, Ge(0)]
AtLeastOne = Annotated[Integer, Ge(1)]
Bytes = Annotated[Count, BeforeValidator(quantities.read_bytes)]
_Exact = Annotated[
    Fraction,
    BeforeValidator(quantities.read_exact_bytes),
    PlainSerializer(lambda value: int(value) if value.denominator == 1 else float(value)),
    AfterValidator(quantities.require_limits(1e-3, quantities.LARGEST)),
]
ExactBytes = Annotated[_Exact, Gt(0)]
"""Mean sizes may include fractions of a byte (114660.07), kept exactly so that ceilings are right."""
SpreadBytes = Annotated[_Exact, Ge(0)]
Seconds = Annotated[
    float,
    Strict(),
    Ge(0),
    BeforeValidator(quantities.read_seconds),
    AfterValidator(quantities.require_limits(*quantities.TIMES)),
]
Time = Annotated[
    quantities.Duration, PlainValidator(quantities.read_duration), PlainSerializer(quantities.write_duration)
]
Share = Annotated[float, Strict(), Ge(0), Le(1), AfterValidator(quantities.require_limits(1e-3, 1))]
ElementType = Annotated[str, AfterValidator(quantities.read_element_type)]
"""A numpy name such as float32; in Parquet also `string` and `binary`, whose elements are bytes."""
Secret = Annotated[str | None, Field(exclude=True)]
"""A value that no printed form shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """The stages that run. `checkpoint` without `train` measures only checkpoints."""

    generate_data: bool = False
    train: bool = True
    evaluation: bool = False
    checkpoint: bool = False
    profiling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetColumn:
    """One Parquet column: `size` elements of `dtype` in every row. Training reads it if `read` is true."""

    name: str
    dtype: ElementType = "float32"
    size: AtLeastOne = 1
    read: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Parquet:
    """The layout of Parquet files.

    Without `columns`, there is one column, of byte strings of a record's size. `row_group_size` and
    `generation_batch_size` are in rows; a batch of 0 rows is one row group.
    """

    columns: tuple[ParquetColumn, ...] = ()
    row_group_size: AtLeastOne = 1024
    partition_by: str | None = None
    generation_batch_size: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hdf5:
    """The chunks of HDF5 datasets: `chunk_dims` in elements, empty for contiguous datasets."""

    chunk_dims: tuple[AtLeastOne, ...] = ()
    num_dset_per_record: AtLeastOne = 1
    max_shape: tuple[AtLeastOne, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The files on storage. `record_dims`, if given, replaces `record_length_bytes`.

    `num_subfolders_*` of 0 or 1 means none. `record_length_bytes_resize` is the size of a sample after
    preprocessing, 0 for its size as read; `listing_validation_interval` of 0 validates nothing.
    """

    format: enums.DataFormat = enums.DataFormat.TFRECORD
    data_folder: str = "./data/"
    num_files_train: Count = 8
    num_files_eval: Count = 0
    num_samples_per_file: AtLeastOne = 1
    record_length_bytes: ExactBytes = Fraction(65536)
    record_length_bytes_stdev: SpreadBytes = Fraction(0)
    record_length_bytes_resize: Bytes = 0
    record_dims: tuple[AtLeastOne, ...] = ()
    record_element_type: ElementType = "uint8"
    num_subfolders_train: Count = 0
    num_subfolders_eval: Count = 0
    file_prefix: str = "img"
    compression: enums.Compression = enums.Compression.NONE
    compression_level: Annotated[Count, Le(9)] = 4
    enable_chunking: bool = False
    chunk_size_bytes: Annotated[Bytes, Field(alias="chunk_size")] = 0
    keep_files: bool = True
    skip_listing: bool = False
    listing_validation_interval: Count = 1000
    listing_threads: AtLeastOne = 4
    parquet: Parquet = field(default_factory=Parquet)
    hdf5: Hdf5 = field(default_factory=Hdf5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSection:
    """Settings for reading samples. `read_threads` and `write_threads` of None depend on the machine's cores.

    `prefetch_size` is in batches, `shuffle_size` in samples; `transfer_bytes` of None leaves the size of
    sequential reads to the format. `drop_page_cache`, which DLIO does not have, evicts what an epoch is about
    to read.
    """

    data_loader: enums.LoaderKind = enums.LoaderKind.TENSORFLOW
    batch_size: AtLeastOne = 1
    batch_size_eval: AtLeastOne = 1
    read_threads: Count | None = None
    write_threads: AtLeastOne | None = None
    computation_threads: AtLeastOne = 1
    prefetch_size: Count = 2
    file_shuffle: enums.Shuffle = enums.Shuffle.OFF
    sample_shuffle: enums.Shuffle = enums.Shuffle.OFF
    shuffle_size: AtLeastOne = 1024
    read_type: enums.ReadType = enums.ReadType.ON_DEMAND
    file_access: enums.FileSharing = enums.FileSharing.MULTI
    transfer_bytes: Annotated[
        Annotated[AtLeastOne, BeforeValidator(quantities.read_bytes)] | None, Field(alias="transfer_size")
    ] = None
    odirect: bool = False
    drop_page_cache: bool = True
    pin_memory: bool = True
    multiprocessing_context: enums.ProcessStart = enums.ProcessStart.SPAWN
    preprocess_time: Time = field(default_factory=quantities.Duration)
    transformed_record_dims: tuple[AtLeastOne, ...] = ()
    transformed_record_element_type: ElementType = "uint8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """The emulated training. `total_training_steps` of None runs whole epochs."""

    epochs: AtLeastOne = 1
    total_training_steps: AtLeastOne | None = None
    seed: Count = 123
    seed_change_epoch: bool = True
    computation_time: Time = field(default_factory=quantities.Duration)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The emulated evaluation: first after epoch `eval_after_epoch`, then every `epochs_between_evals`.

    An interval of 0 is for workloads that do not evaluate.
    """

    eval_time: Time = field(default_factory=quantities.Duration)
    eval_after_epoch: AtLeastOne = 1
    epochs_between_evals: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Settings for writing checkpoints: when and how.

    `steps_between_checkpoints`, if given, replaces the two settings that count epochs.
    """

    checkpoint_folder: str = "./checkpoints/"
    checkpoint_after_epoch: AtLeastOne = 1
    epochs_between_checkpoints: AtLeastOne = 1
    steps_between_checkpoints: AtLeastOne | None = None
    type: enums.CheckpointWriters = enums.CheckpointWriters.RANK_ZERO
    fsync: bool = False
    recovery_rank_shift: bool = False
    rank_sync: bool = False
    time_between_checkpoints_s: Annotated[Seconds, Field(alias="time_between_checkpoints")] = 0.0
    num_checkpoints_write: Count = 0
    num_checkpoints_read: Count = 0
    mode: enums.CheckpointMode = enums.CheckpointMode.DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The ranks over which a model is split; `data` of None follows from the number of ranks."""

    tensor: AtLeastOne = 1
    pipeline: AtLeastOne = 1
    data: AtLeastOne | None = None
    zero_stage: Annotated[Count, Le(3)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The dimensions from which a transformer's parameters are counted."""

    vocab_size: AtLeastOne = 32000
    hidden_size: AtLeastOne = 2048
    ffn_hidden_size: AtLeastOne = 8192
    num_attention_heads: AtLeastOne = 32
    num_kv_heads: AtLeastOne = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The content of a checkpoint: plain bytes, explicit layers, or a `transformer`.

    `num_layers` of None means that the layout is not by layers. `layer_parameters` and `optimization_groups`
    count the elements of each tensor that a rank holds.
    """

    name: str = "default"
    type: str | None = None
    model_size_bytes: Bytes = 10240
    model_datatype: enums.Datatype = enums.Datatype.FP16
    optimizer_datatype: enums.Datatype = enums.Datatype.FP32
    num_layers: AtLeastOne | None = None
    layer_parameters: tuple[AtLeastOne, ...] = ()
    optimization_groups: tuple[AtLeastOne, ...] = ()
    parallelism: Parallelism = field(default_factory=Parallelism)
    transformer: Transformer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSection:
    """The place of results; `folder` of None leaves the choice to the command."""

    folder: str | None = None
    log_file: str = "dlio.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The criteria for a run: the accelerator utilization `au` to reach, and the steps that do not count."""

    au: Share = 0.90
    exclude_start_steps: Count = 1
    exclude_end_steps: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiling:
    """The program that observes a run from outside, and the devices that it watches."""

    profiler: enums.Profiler = enums.Profiler.IOSTAT
    iostat_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """Options for access to object storage. None leaves the choice to the storage's own defaults.

    `prefetch_window` and `max_outstanding` are reads in flight, per worker and per process. The two keys are
    secrets, left out of every printed form.
    """

    endpoint_url: str | None = None
    access_key_id: Secret = field(default=None, repr=False)
    secret_access_key: Secret = field(default=None, repr=False)
    region: str | None = None
    uri_scheme: str | None = None
    secure: bool | None = None
    s3_force_path_style: bool | None = None
    s3_max_attempts: AtLeastOne | None = None
    s3_profile: str | None = None
    prefetch_window: AtLeastOne | None = None
    prefetch_workers: AtLeastOne | None = None
    max_outstanding: AtLeastOne | None = None
    columns: tuple[str, ...] = ()
    decode: enums.Decode | None = None


SECRET_NAMES: Final = frozenset(entry.name for entry in fields(StorageOptions) if not entry.repr)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSection:
    """The location of data, in DLIO's terms; a `--data` URI replaces it.

    `endpoint_uris` are the addresses of one service, used round-robin instead of `endpoint_url`.
    """

    storage_type: enums.StorageKind = enums.StorageKind.LOCAL_FS
    storage_root: str = "./"
    storage_library: enums.StorageLibrary | None = None
    post_generation_settle_s: Annotated[Seconds, Field(alias="post_generation_settle_seconds")] = 0.0
    endpoint_uris: tuple[str, ...] = ()
    storage_options: StorageOptions = field(default_factory=StorageOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A complete workload. `name` is its family's or YAML file's; `accelerator` is "" if none was given."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # of all sections

    name: str
    accelerator: str = ""
    framework: enums.Framework = enums.Framework.TENSORFLOW
    workflow: Workflow = field(default_factory=Workflow)
    dataset: Dataset = field(default_factory=Dataset)
    reader: ReaderSection = field(default_factory=ReaderSection)
    train: Train = field(default_factory=Train)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    model: Model = field(default_factory=Model)
    output: OutputSection = field(default_factory=OutputSection)
    metric: Metric = field(default_factory=Metric)
    profiling: Profiling = field(default_factory=Profiling)
    storage: StorageSection = field(default_factory=StorageSection)

    @property
    def full_name(self) -> str:
        """The name for `workload=` on DLIO's command line, such as `unet3d_h100`."""
        return f"{self.name}_{self.accelerator}" if self.accelerator else self.name


_NOT_IN_FILES: Final = ("name", "accelerator")
"""Fields that come from a file's name and the command line."""


@cache
def _adapter() -> TypeAdapter[Workload]:
    return TypeAdapter(Workload)


def read_workload(
    tree: Mapping[str, Any], *, name: str, accelerator: str
) -> tuple[Workload | None, list[tuple[KeyPath, str]]]:
    """Return the workload that `tree` describes, or what is wrong with each path ("" for an unknown key)."""
    try:
        workload = _adapter().validate_python({**tree, "name": name, "accelerator": accelerator})
    except ValidationError as refused:
        return None, [_describe(error) for error in refused.errors(include_url=False)]
    return workload, []


def write_workload(workload: Workload, *, only_set: bool = False) -> dict[str, Any]:
    """Return all values under DLIO's keys, including defaults, as plain values.

    Unset values are None, or left out if `only_set`.
    """
    tree = _adapter().dump_python(workload, mode="json", by_alias=True, exclude_none=only_set)
    return {key: value for key, value in tree.items() if key not in _NOT_IN_FILES}


def known_paths(section: type = Workload, above: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield every key as a path; the keys of a list's elements are below the list's own key."""
    hints = get_type_hints(section, include_extras=True)
    for entry in fields(section):
        if section is Workload and entry.name in _NOT_IN_FILES:
            continue
        hint = hints[entry.name]
        is_value = get_origin(hint) is Annotated
        marks = (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, FieldInfo))
        key = next((mark.alias for mark in marks if mark.alias), entry.name)
        inner = [] if is_value else [option for option in (hint, *get_args(hint)) if is_dataclass(option)]
        if not inner or get_origin(hint) is tuple:
            yield (*above, key)
        for section_type in inner:
            yield from known_paths(section_type, (*above, key))  # type: ignore[arg-type]  # types, no instances


def _describe(error: Any) -> tuple[KeyPath, str]:
    path = tuple(str(step) for step in error["loc"])
    if error["type"] == "unexpected_keyword_argument":
        return path, ""
    if error["type"] == "dataclass_type":
        return path, f"is {error['input']!r}, but it must be a section of keys"
    if error["type"] == "missing":
        return path, "is missing"
    cause = error.get("ctx", {}).get("error")
    reason = str(cause) if cause is not None else f"it {error['msg'].removeprefix('Input ')}"
    return path, f"is {'a secret' if path[-1] in SECRET_NAMES else repr(error['input'])}: {reason}"
