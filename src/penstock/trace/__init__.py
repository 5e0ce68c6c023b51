"""I/O traces: capture, load, query and compare them.

`load` opens traces of any dialect; `span`, `traced`, `steps` and `tracing_to` trace your own program. Each
name is imported on first use, so that tracing a trainer does not import DuckDB.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.optional_libraries import explained_imports

if TYPE_CHECKING:
    from penstock.trace.api import load
    from penstock.trace.capture.recorder import span, steps, traced, tracing_to

__all__ = ["load", "span", "steps", "traced", "tracing_to"]

_SPANS = "penstock.trace.capture.recorder"
_HOMES = {
    "load": "penstock.trace.api",
    "span": _SPANS,
    "steps": _SPANS,
    "traced": _SPANS,
    "tracing_to": _SPANS,
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with explained_imports("trace"):
        return getattr(importlib.import_module(_HOMES[name]), name)
