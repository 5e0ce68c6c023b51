"""The values from which a workload may choose, spelled as in DLIO."""

from enum import StrEnum
from typing import Self


class Choice(StrEnum):
    """A value from a fixed set, read in any case."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        spelled = value.lower() if isinstance(value, str) else value
        return next((member for member in cls if member.value == spelled), None)


class Framework(Choice):
    """The framework whose way of loading is imitated."""

    TENSORFLOW = "tensorflow"
    PYTORCH = "pytorch"


class DataFormat(Choice):
    """The format of data files. One line declares a format.

    The line holds the format's name in workloads, its opener (`module:callable` of
    `penstock.dataset.formats`, called with the data set and the seed of its sample sizes), the endings of
    file names in external data sets if they differ from the name, and whether files are streams, read front
    to back.
    """

    opener: str
    endings: tuple[str, ...]
    is_stream: bool

    def __new__(
        cls,
        name: str,
        opener: str = "",
        endings: tuple[str, ...] = (),
        is_stream: bool = False,  # noqa: FBT001, FBT002 - members are rows of a table
    ) -> Self:
        """Keep the columns of the table as attributes; the name is the member's value."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.opener = opener
        member.endings = endings or (f".{name}",)
        member.is_stream = is_stream
        return member

    TFRECORD = "tfrecord", "tfrecord:TFRecordFormat", (".tfrecord", ".tfrecords"), True
    HDF5 = "hdf5", "hdf5:Hdf5Format", (".hdf5", ".h5")
    HDF5_OPT = "hdf5_opt", "hdf5:Hdf5Format", (".hdf5_opt", ".hdf5", ".h5")
    CSV = "csv", "csvtext:CsvFormat"
    NPZ = "npz", "npz:open_npz"
    NPY = "npy", "npz:NpyFormat"
    JPEG = "jpeg", "images:JpegFormat", (".jpeg", ".jpg")
    PNG = "png", "images:PngFormat"
    INDEXED_BINARY = "indexed_binary", "indexed_binary:IndexedFormat"
    MMAP_INDEXED_BINARY = "mmap_indexed_binary", "indexed_binary:IndexedFormat"
    SYNTHETIC = "synthetic", "synthetic:SyntheticFormat"
    PARQUET = "parquet", "parquet:ParquetFormat"


class Compression(Choice):
    """The compression of files, or of columns in them."""

    NONE = "none"
    GZIP = "gzip"
    LZF = "lzf"
    BZ2 = "bz2"
    ZIP = "zip"
    XZ = "xz"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


class Shuffle(Choice):
    """The order of samples.

    Off: as stored. Seed: different in each epoch, the same in every run. Random: different in every run.
    """

    OFF = "off"
    SEED = "seed"
    RANDOM = "random"

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        # YAML 1.1 reads a bare `off` as false.
        return super()._missing_("off" if value is False else value)


class LoaderKind(Choice):
    """The data loader that a workload names."""

    TENSORFLOW = "tensorflow"
    PYTORCH = "pytorch"
    DALI = "dali"
    NATIVE_DALI = "native_dali"
    SYNTHETIC = "synthetic"
    NONE = "none"
    CUSTOM = "custom"


class ReadType(Choice):
    """The time at which samples are read: when they are needed, or all before the first step."""

    ON_DEMAND = "on_demand"
    MEMORY = "memory"


class FileSharing(Choice):
    """The files that a rank uses: its own, or parts of files that all ranks share."""

    MULTI = "multi"
    SHARED = "shared"
    COLLECTIVE = "collective"


class ProcessStart(Choice):
    """The start method of worker processes."""

    FORK = "fork"
    SPAWN = "spawn"
    FORKSERVER = "forkserver"


class StorageKind(Choice):
    """DLIO's names for kinds of storage; `local_fs` and `parallel_fs` are files."""

    LOCAL_FS = "local_fs"
    DIRECT_FS = "direct_fs"
    PARALLEL_FS = "parallel_fs"
    S3 = "s3"
    AISTORE = "aistore"


class StorageLibrary(Choice):
    """The client library for object storage."""

    OBSTORE = "obstore"
    MINIO = "minio"
    S3DLIO = "s3dlio"
    S3TORCHCONNECTOR = "s3torchconnector"


class Decode(Choice):
    """The handling of Parquet bytes: they stay raw, or are decoded after reading."""

    RAW = "raw"
    ARROW = "arrow"


class CheckpointWriters(Choice):
    """The ranks that write a checkpoint of plain model bytes."""

    RANK_ZERO = "rank_zero"
    ALL_RANKS = "all_ranks"


class CheckpointMode(Choice):
    """The ranks that take part: all of the model's layout, or a subset that stands for them."""

    DEFAULT = "default"
    SUBSET = "subset"


class Datatype(Choice):
    """The element types of model and optimizer state."""

    INT8 = "int8"
    UINT8 = "uint8"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    FP64 = "fp64"


class Profiler(Choice):
    """The program that observes a run from outside."""

    NONE = "none"
    IOSTAT = "iostat"
    DARSHAN = "darshan"
    TENSORBOARD = "tensorboard"
