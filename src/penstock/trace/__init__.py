"""I/O traces: captured, loaded, asked, compared, explained.

`load` opens traces of any kind; `span`, `traced`, `steps` and `tracing_to` trace a program of one's own. What
is imported for them comes with their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.extras import explained_imports

if TYPE_CHECKING:
    from penstock.trace.api import load
    from penstock.trace.capture.spans import span, steps, traced, tracing_to

__all__ = ["load", "span", "steps", "traced", "tracing_to"]

_SPANS = "penstock.trace.capture.spans"
_HOMES = {
    "load": "penstock.trace.api",
    "span": _SPANS,
    "steps": _SPANS,
    "traced": _SPANS,
    "tracing_to": _SPANS,
}


def __getattr__(name: str) -> Any:
    """Import the home of a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with explained_imports("trace"):
        return getattr(importlib.import_module(_HOMES[name]), name)
