"""A trouble of a run: what stands out, in a sentence, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trouble:
    """`kind` tells troubles apart, `since` says when it began, if it did not from the start."""

    kind: str
    says: str
    to_do: str
    since: str = ""
