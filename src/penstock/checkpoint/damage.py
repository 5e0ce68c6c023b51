"""What is wrong with a stored checkpoint: one record for each place, as verification lists them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Damage:
    """Bytes `begin` to `end` of `file` are wrong. `item` is "" where they belong to none."""

    file: str
    begin: int
    end: int
    item: str
    what: str

    def __str__(self) -> str:
        item = f", {self.item}" if self.item else ""
        return f"{self.file}{item}, bytes {self.begin} to {self.end}: {self.what}"
