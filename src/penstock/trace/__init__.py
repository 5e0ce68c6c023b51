"""I/O traces: captured, loaded, asked, compared, explained.

`load` opens traces of any kind; what is imported for that comes with its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.trace.session import load

__all__ = ["load"]

_HOMES = {"load": "penstock.trace.session"}


def __getattr__(name: str) -> Any:
    """Import the home of a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
