"""An order: all that a daemon needs to know to make one cached step durable, without asking anybody.

Written into each node's cache by its first rank, read by its daemon. Invariant: an order appears whole or not
at all, and stays until its step is durable or superseded; a newer save of the same step replaces it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.checkpoint.steps import name_of
from penstock.errors import DataDamaged
from penstock.storage.files.durable import sync_folder, write_durably

FOLDER: Final = ".penstock-flush"
"""In each cache, beside its steps: orders, journal, notes of trainers, the daemon's lock and log."""

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OrderedFile(_Strict):
    """One file of a step, as its writer tells it."""

    name: Text
    size_bytes: Count


class Order(_Strict):
    """Make this node's share of a step durable, and the step with it."""

    format: Literal[1] = 1
    step: Count
    save_id: Annotated[str, Field(pattern=r"\A[0-9a-f]{16}\z")]
    durable: Text
    """URI of the durable level, with its options."""
    node: Count
    """Which of `nodes` this cache is."""
    nodes: Annotated[list[list[OrderedFile]], Field(min_length=1)]
    """By node: the files that lie in its cache, and become durable with the others'."""
    keep: Annotated[int, Field(ge=1)] | None
    """How many durable steps stay."""
    bytes_per_s: Annotated[float, Field(gt=0)] | None
    threads: Annotated[int, Field(ge=1)]
    pause_while_saving: bool
    cores: list[Count]
    """Those that no rank of this node uses; all are in use where there are none."""
    given_s: float
    """When, by the clock on the wall."""

    @property
    def name(self) -> str:
        """What the checkpoint is called, on both levels."""
        return name_of(self.step)

    @property
    def files(self) -> list[OrderedFile]:
        """The share of this node."""
        return self.nodes[self.node]

    @property
    def size_bytes(self) -> int:
        """Of this node's share."""
        return sum(file.size_bytes for file in self.files)

    @property
    def sizes(self) -> dict[str, int]:
        """Every file of every node."""
        return {file.name: file.size_bytes for files in self.nodes for file in files}


def read_order(content: bytes, where: str) -> Order:
    """An order as it lies in a cache; `DataDamaged` if it is none."""
    try:
        return Order.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataDamaged(
            f"The order's {place or 'text'}: {first['msg']}",
            where=where,
            fix="Remove the file; the step stays cached, and the next one is flushed again.",
        ) from error


class OrderBook:
    """The orders of one cache. Trainers `put`, the daemon takes away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "orders"

    def put(self, order: Order) -> None:
        """Give an order, durably."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_durably(self._folder / f"{order.name}.json", order.model_dump_json().encode())

    def all(self) -> dict[int, Order | DataDamaged]:
        """By step; what cannot be read is told as its error."""
        found: dict[int, Order | DataDamaged] = {}
        for step in self.steps():
            path = self._folder / f"{name_of(step)}.json"
            try:
                found[step] = read_order(path.read_bytes(), str(path))
            except FileNotFoundError:
                continue
            except DataDamaged as error:
                found[step] = error
        return found

    def steps(self) -> list[int]:
        """The steps that are ordered, ascending."""
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 - asked several times a second
        except FileNotFoundError:
            return []
        texts = [name.removeprefix("step-").removesuffix(".json") for name in names if name.endswith(".json")]
        return sorted(int(text) for text in texts if text.isdecimal())

    def remove(self, order: Order) -> None:
        """Take an order away, unless a newer save of its step has replaced it."""
        path = self._folder / f"{order.name}.json"
        try:
            if read_order(path.read_bytes(), str(path)).save_id != order.save_id:
                return
            path.unlink()
        except FileNotFoundError:
            return
        sync_folder(self._folder)
