"""Samples of a stored file, read as loaders read them, one range after the other."""

from penstock.dataset.formats.format_protocol import Extent, FileFormat, FilePlan, FileSurvey, Sample
from penstock.storage import Source


def read_samples(
    kind: FileFormat, plan: FilePlan, survey: FileSurvey, source: Source, samples: range
) -> Sample:
    pieces = []
    for read in kind.reads(plan, survey, samples):
        if read.part == 0:
            buffer = memoryview(bytearray(read.size_bytes))
            source.read_into(read.offset, buffer)
            pieces.append(Extent(read.offset, buffer))
    return kind.decode(plan, survey, pieces, samples)
