"""Describes a checkpoint by all the ranks that wrote it: each makes spans of `.metadata` and of the manifest.

Ranks tell the planner of each tensor where its regions are; planners and writers make spans, and rank 0
receives one after another while it writes the two files. Invariant: rank 0 holds one span at a time unless
all of them are small, and the files are those of `metadata_bytes` and `manifest_bytes`, but for the order of
places in `.metadata`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.engine import RankSaveStats
from penstock.checkpoint.formats.dcp_metadata import DcpMetadata, Descriptors, Path
from penstock.checkpoint.formats.manifest import (
    OPENING,
    Manifest,
    ManifestFile,
    file_text,
    manifest_frames,
    manifest_head,
    names_text,
    start_checksum,
)
from penstock.checkpoint.formats.metadata_writing import MetadataWriting, SpanNumbers
from penstock.checkpoint.plan.shared_plan import Numbers, Place
from penstock.checkpoint.state.regions import (
    ELEMENT_TYPES,
    CheckpointIndex,
    Ints,
    Regions,
    StoredObject,
    StoredRegions,
)
from penstock.cluster import rounds
from penstock.cluster.rounds import Round, Rounds

if TYPE_CHECKING:
    from penstock.checkpoint.engine import ShareContents, WrittenFile, WrittenShare

KEPT_BYTES = 64 << 20
"""Spans of so many bytes in all are received once, and kept while the files are written."""
NUM_METADATA_SPANS = 8
NUM_SPANS = NUM_METADATA_SPANS + 3


@dataclass(frozen=True, slots=True, eq=False)
class RankDescription:
    """One rank's part of the description; what else there is, is on rank 0 alone."""

    place: Place
    spans: tuple[bytes, ...]
    is_small: bool
    """Whether rank 0 keeps the spans of all ranks."""
    stats: tuple[RankSaveStats, ...]
    """Of all ranks."""
    lengths: Ints
    """(ranks, spans), on rank 0."""
    sizes: Mapping[str, int]
    writing: MetadataWriting

    def send_spans(self) -> Rounds[None]:
        """All ranks but 0: send the spans when rank 0 gets to them, in the order of `SpanReader`."""
        for turn in span_turns(is_small=self.is_small):
            for number in turn:
                if self.spans[number]:
                    yield Round([(0, self.spans[number])], (), len(self.spans[number]))


def span_turns(*, is_small: bool) -> list[range]:
    """Which spans rank 0 reads, one turn after another: once for the checksums, once more to write them."""
    metadata, everything = range(NUM_METADATA_SPANS), range(NUM_SPANS)
    manifest = range(NUM_METADATA_SPANS, NUM_SPANS)
    return [everything] if is_small else [everything, manifest, metadata]


def describe(
    place: Place, share: WrittenShare, numbers: Numbers, transforms: Descriptors
) -> Rounds[RankDescription]:
    """Make this rank's spans."""
    contents = share.contents
    counts = [len(share.files), sum(map(len, contents.objects))]
    (first_file, _), (first_object, num_objects) = yield from rounds.count_before(*place, counts)
    first = SpanNumbers(numbers.planned_by(place.rank).start, first_object, first_file)
    part = yield from _collect_places(place, share, numbers, first)
    if transforms:
        part = replace(
            part,
            transforms=((), transforms),
            row_transform=np.ones(len(part.index.stored), dtype=np.int64),
            object_transforms={stored.name: transforms for stored in part.index.objects},
        )
    dtypes = yield from _all_dtypes(place, part)
    writing = MetadataWriting(dtypes=dtypes, num_tensors=numbers.total, num_objects=num_objects)
    texts = _manifest_spans(share, contents, numbers.total + first.object)
    spans = (*writing.spans(part, first), *texts)
    ((_, all_bytes),) = yield from rounds.count_before(*place, [sum(map(len, spans))])
    sizes = [[place.rank, number, len(span)] for number, span in enumerate(spans) if span]
    rows = np.array(sizes, dtype=np.int64).reshape(-1, 3)
    rows = yield from rounds.route(*place, np.zeros(len(rows), dtype=np.int64), rows)
    lengths = np.zeros((place.size if place.rank == 0 else 0, NUM_SPANS), dtype=np.int64)
    lengths[rows[:, 0], rows[:, 1]] = rows[:, 2]
    reports = yield from rounds.route_texts(*place, [(0, pack_report(share))])
    known = [unpack_report(text) for _, text in reports]
    figures = yield from rounds.from_rank0(*place, b"".join(figures for figures, _ in known))
    return RankDescription(
        place,
        spans,
        all_bytes <= KEPT_BYTES,
        unpack_figures(figures),
        lengths,
        {name: size for _, files in known for name, size in files.items()},
        writing,
    )


_FIGURES = struct.Struct("<iqq6fq")
"""All fields of `RankSaveStats`, in their order; seconds to seven digits."""
_FIELDS = tuple(each.name for each in fields(RankSaveStats))


def pack_report(share: WrittenShare) -> bytes:
    """What others learn of a rank's share, in few bytes: figures, and the names and sizes of files."""
    sizes = np.array([file.size_bytes for file in share.files], dtype="<i8")
    names = "\0".join(file.name for file in share.files).encode("utf-8", "surrogatepass")
    return _FIGURES.pack(*astuple(share.stats)) + struct.pack("<I", len(sizes)) + sizes.tobytes() + names


def unpack_report(text: bytes) -> tuple[bytes, dict[str, int]]:
    """The figures, still packed, and the size of each file."""
    begin = _FIGURES.size + 4
    (count,) = struct.unpack_from("<I", text, begin - 4)
    sizes = np.frombuffer(text, dtype="<i8", count=count, offset=begin).tolist()
    names = text[begin + 8 * count :].decode("utf-8", "surrogatepass").split("\0")
    return text[: _FIGURES.size], dict(zip(names[:count], sizes, strict=True))


def unpack_figures(packed: bytes) -> tuple[RankSaveStats, ...]:
    """The figures of ranks, one after another."""
    return tuple(
        RankSaveStats(**dict(zip(_FIELDS, values, strict=True))) for values in _FIGURES.iter_unpack(packed)
    )


def _collect_places(
    place: Place, share: WrittenShare, numbers: Numbers, first: SpanNumbers
) -> Rounds[DcpMetadata]:
    """What this rank describes: its tensors, wherever they were written, and the objects that it wrote."""
    contents = share.contents
    (width,) = yield from rounds.largest_of_all(
        *place, [max((regions.num_dims for regions in contents.regions), default=0)]
    )
    tables = [
        _places(first.file + number, file, regions.widened(width), len(named))
        for number, (file, regions, named) in enumerate(
            zip(share.files, contents.regions, contents.objects, strict=True)
        )
    ]
    table = np.concatenate([np.zeros((0, 5 + 2 * width), dtype=np.int64), *tables])
    table = yield from rounds.route(*place, numbers.planner(table[:, 0]), table)
    table = table[np.lexsort((table[:, 2], table[:, 1], table[:, 0]))]
    regions = Regions(table[:, 0] - first.tensor, table[:, 5 : 5 + width], table[:, 5 + width :])
    nowhere = np.zeros(len(table), dtype=np.int64)
    stored = StoredRegions(
        regions, table[:, 1] - first.file, table[:, 3], table[:, 4], nowhere, nowhere.astype(np.bool_)
    )
    objects = [
        StoredObject(name, number, int(file.item_offset[row]), int(file.item_bytes[row]))
        for number, (file, named) in enumerate(zip(share.files, contents.objects, strict=True))
        for row, (name, _) in enumerate(named)
    ]
    index = CheckpointIndex(
        tuple(facts for facts, _ in contents.tensors),
        stored,
        tuple(objects),
        tuple(file.name for file in share.files),
    )
    paths: dict[str, Path] = {facts.name: path for facts, path in contents.tensors}
    paths |= {name: path for named in contents.objects for name, path in named}
    return DcpMetadata(index=index, paths=paths)


def _places(number: int, file: WrittenFile, regions: Regions, num_objects: int) -> Ints:
    """A row for each region of a file: tensor, file, row, offset and bytes in it, place in the tensor."""
    rows = np.arange(len(regions))
    columns = (regions.tensor, np.full(len(rows), number), rows)
    places = (file.item_offset[num_objects:], file.item_bytes[num_objects:])
    return np.column_stack([*columns, *places, regions.offsets, regions.sizes])


def _all_dtypes(place: Place, part: DcpMetadata) -> Rounds[tuple[str, ...]]:
    """The element types that occur, in an order that all ranks know."""
    known = tuple(ELEMENT_TYPES)
    own = sum({1 << known.index(facts.dtype) for facts in part.index.tensors})
    mask = yield from rounds.mask_of_all(*place, own, num_bytes=8)
    return tuple(name for number, name in enumerate(known) if mask >> number & 1)


def _manifest_spans(share: WrittenShare, contents: ShareContents, first_object: int) -> tuple[bytes, ...]:
    """Names of tensors, names of objects, and files, each after a comma."""
    files = []
    for file, named, regions in zip(share.files, contents.objects, contents.regions, strict=True):
        names = np.concatenate([first_object + np.arange(len(named)), regions.tensor])
        first_object += len(named)
        described = ManifestFile(
            name=file.name,
            size_bytes=file.size_bytes,
            item_name=names,
            item_offset=file.item_offset,
            item_bytes=file.item_bytes,
            payload_offset=file.payload_offset,
            sums=file.sums,
        )
        files.append(b"," + file_text(described))
    return (
        _after_comma([facts.name for facts, _ in contents.tensors]),
        _after_comma([name for named in contents.objects for name, _ in named]),
        b"".join(files),
    )


def _after_comma(names: Sequence[str]) -> bytes:
    return b"," + names_text(names) if names else b""


@dataclass(slots=True, eq=False)
class SpanReader:
    """On rank 0: the two files, put together from the spans of all ranks.

    `receive` waits for the messages of a round. `manifest` describes the checkpoint but for names and files.
    """

    description: RankDescription
    manifest: Manifest
    metadata_of: DcpMetadata
    receive: Callable[[Round], list[bytes]]
    _kept: dict[int, list[bytes]] = field(default_factory=dict)
    _own_sum: bytes = b""
    _due: list[tuple[int, int]] = field(default_factory=list)
    """What the other ranks still send: rank and number of the span, in order."""

    def __post_init__(self) -> None:
        lengths = self.description.lengths
        for turn in span_turns(is_small=self.description.is_small):
            self._due += [
                (rank, number)
                for number in turn
                for rank in np.flatnonzero(lengths[:, number]).tolist()
                if rank
            ]
        self._due.reverse()

    @property
    def sizes(self) -> Mapping[str, int]:
        """By name of every data file of every rank."""
        return self.description.sizes

    def survey(self) -> None:
        """Receive all spans once, for the checksums that the manifest begins with."""
        metadata, size_bytes = start_checksum(), 0
        for part in self._metadata_parts():
            metadata.update(part)
            size_bytes += len(part)
        self.manifest = replace(self.manifest, metadata_bytes=size_bytes, metadata_sum=metadata.digest())
        total = start_checksum()
        total.update(OPENING + manifest_head(self.manifest))
        for part in self._manifest_body():
            total.update(part)
        self._own_sum = total.digest().hex().encode()

    def drain(self) -> None:
        """Receive what nobody wants any more, so that the senders can go on."""
        while self._due:
            self._next(*self._due[-1])

    def _spans(self, number: int) -> Iterator[bytes]:
        """One span of each rank."""
        if number in self._kept:
            yield from self._kept[number]
            return
        keeps = self.description.is_small
        kept = []
        for rank in np.flatnonzero(self.description.lengths[:, number]).tolist():
            span = self._next(rank, number) if rank else self.description.spans[number]
            if keeps:
                kept.append(span)
            yield span
        if keeps:
            self._kept[number] = kept

    def _next(self, rank: int, number: int) -> bytes:
        assert self._due.pop() == (rank, number), "spans are read in the order in which they are sent"
        (span,) = self.receive(Round((), [rank], int(self.description.lengths[rank, number])))
        return span

    def _metadata_parts(self) -> Iterator[bytes]:
        frames = self.description.writing.frames(self.metadata_of)
        for number, frame in enumerate(frames[:-1]):
            yield frame
            yield from self._spans(number)
        yield frames[-1]

    def _manifest_body(self) -> Iterator[bytes]:
        """All of the manifest after its checksum."""
        _, between, ending = manifest_frames(self.manifest, b"")
        tensors, objects, files = range(NUM_METADATA_SPANS, NUM_SPANS)
        yield from _without_comma(self._spans_of(tensors, objects))
        yield between
        yield from _without_comma(self._spans_of(files))
        yield ending

    def _spans_of(self, *numbers: int) -> Iterator[bytes]:
        for number in numbers:
            yield from self._spans(number)

    def manifest_parts(self) -> Iterator[bytes]:
        """The content of `penstock.json`; after `survey`."""
        opening, *_ = manifest_frames(self.manifest, self._own_sum)
        yield opening
        yield from self._manifest_body()

    def metadata_parts(self) -> Iterator[bytes]:
        """The content of `.metadata`; after `manifest_parts`."""
        return self._metadata_parts()


def _without_comma(spans: Iterator[bytes]) -> Iterator[bytes]:
    """Items that each follow a comma, as a list has them."""
    for span in spans:
        yield span[1:]
        break
    yield from spans
