"""Patterns of names, as in `model.*`: which parts of a state a save or a load is about. Pure."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.checkpoint.engine import Names


def matches(name: str, patterns: Names) -> bool:
    """Whether one of the patterns is for `name`; upper and lower case differ."""
    each = (patterns,) if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in each)
