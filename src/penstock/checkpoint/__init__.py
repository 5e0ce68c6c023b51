"""The checkpoint engine, a library for training loops that knows nothing of benchmarks.

    import penstock.checkpoint as pc
    manager = pc.Manager("/pfs/run", keep=3)

Nothing is imported before it is asked for: torch is loaded by the first use of what needs it.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.checkpoint.handle import SaveHandle, SaveReport
    from penstock.checkpoint.manager import Manager
    from penstock.checkpoint.step_reader import load
    from penstock.checkpoint.step_writer import save
    from penstock.checkpoint.torch_dcp.planner import SavePlanner
    from penstock.checkpoint.torch_dcp.writer import Writer

__all__ = ["Manager", "SaveHandle", "SavePlanner", "SaveReport", "Writer", "load", "save"]

_PLACES: Final = MappingProxyType(
    {
        "Manager": "manager",
        "SaveHandle": "handle",
        "SavePlanner": "torch_dcp.planner",
        "SaveReport": "handle",
        "Writer": "torch_dcp.writer",
        "load": "step_reader",
        "save": "step_writer",
    }
)
"""Public name -> the module here that has it."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"penstock.checkpoint has no {name!r}. It has: {', '.join(__all__)}.")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
