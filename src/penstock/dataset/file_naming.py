"""File names as a formula: a data set of any size is computed or listed, never a list of names in memory.

Generation, orders and loaders speak of file 0 to n - 1 and ask for a name when they need one.
`index(name(i)) == i` for every file, and `index` is None for every other name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.workload.spec import Dataset


class FileNames(Protocol):
    """The names of a data set's files, as keys below its root. Any thread may ask."""

    def __len__(self) -> int:
        """How many files there are."""

    def name(self, index: int) -> str:
        """The key of file `index`; IndexError outside of the set."""

    def index(self, name: str) -> int | None:
        """Which file has this key; None if none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedFiles:
    """The names that DLIO's generator gives: `train/03/img_0017_of_1000.npz`.

    `num_subfolders` of 0 and 1 mean none; else file i is in subfolder i mod n. Numbers are padded with zeros
    to the width of the counts themselves: 10 subfolders are 00 to 09.
    """

    folder: str
    count: int
    suffix: str
    prefix: str = "img"
    num_subfolders: int = 0

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        """The key of file `index`."""
        if not 0 <= index < self.count:
            raise IndexError(f"file {index} of {self.count}")
        return f"{self._folder_of(index)}{self.prefix}_{index:0{self._width}}{self._ending}"

    def index(self, name: str) -> int | None:
        """Which file has this key, found by computing, not by looking."""
        digits = name.removesuffix(self._ending)[-self._width :]
        if not (digits.isascii() and digits.isdigit()):
            return None
        index = int(digits)
        return index if index < self.count and self.name(index) == name else None

    def folders(self) -> tuple[str, ...]:
        """The folders that hold all of them."""
        if self.num_subfolders <= 1:
            return (self.folder,)
        return tuple(self._folder_of(number).rstrip("/") for number in range(self.num_subfolders))

    @property
    def _width(self) -> int:
        return len(str(self.count))

    @property
    def _ending(self) -> str:
        return f"_of_{self.count}.{self.suffix}"

    def _folder_of(self, index: int) -> str:
        if self.num_subfolders <= 1:
            return f"{self.folder}/"
        width = len(str(self.num_subfolders))
        return f"{self.folder}/{index % self.num_subfolders:0{width}}/"


def training_files(dataset: Dataset) -> NumberedFiles:
    """What the workload calls its training files."""
    return NumberedFiles(
        folder="train",
        count=dataset.num_files_train,
        suffix=dataset.format,
        prefix=dataset.file_prefix,
        num_subfolders=dataset.num_subfolders_train,
    )


def evaluation_files(dataset: Dataset) -> NumberedFiles:
    """What the workload calls its evaluation files."""
    return NumberedFiles(
        folder="valid",
        count=dataset.num_files_eval,
        suffix=dataset.format,
        prefix=dataset.file_prefix,
        num_subfolders=dataset.num_subfolders_eval,
    )
