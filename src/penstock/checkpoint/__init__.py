"""The checkpoint engine, a library for training loops that knows nothing of benchmarks.

    import penstock.checkpoint as pc
    manager = pc.Manager("/pfs/run", keep=3)

Nothing is imported before it is asked for: torch is loaded by the first use of what needs it.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from penstock.extras import explained_imports

if TYPE_CHECKING:
    from penstock.checkpoint.api import DryRun, dry_run, load, save
    from penstock.checkpoint.levels.options import DoubleParity, Flush, Partner, Single, Xor
    from penstock.checkpoint.loading.loader import LoadReport
    from penstock.checkpoint.manager.manager import Manager, SaveHandle, SaveReport
    from penstock.checkpoint.manager.save_policy import (
        Daly,
        EverySeconds,
        EverySteps,
        Overhead,
        StopConditions,
    )
    from penstock.checkpoint.torch_dcp.planners import LoadPlanner, SavePlanner
    from penstock.checkpoint.torch_dcp.reader import Reader
    from penstock.checkpoint.torch_dcp.writer import Writer

__all__ = [
    "Daly",
    "DoubleParity",
    "DryRun",
    "EverySeconds",
    "EverySteps",
    "Flush",
    "LoadPlanner",
    "LoadReport",
    "Manager",
    "Overhead",
    "Partner",
    "Reader",
    "SaveHandle",
    "SavePlanner",
    "SaveReport",
    "Single",
    "StopConditions",
    "Writer",
    "Xor",
    "dry_run",
    "load",
    "save",
]

_PLACES: Final = MappingProxyType(
    {
        "Daly": "manager.save_policy",
        "DoubleParity": "levels.options",
        "DryRun": "api",
        "EverySeconds": "manager.save_policy",
        "EverySteps": "manager.save_policy",
        "Flush": "levels.options",
        "LoadPlanner": "torch_dcp.planners",
        "LoadReport": "loading.loader",
        "Manager": "manager.manager",
        "Overhead": "manager.save_policy",
        "Partner": "levels.options",
        "Reader": "torch_dcp.reader",
        "SaveHandle": "manager.manager",
        "SavePlanner": "torch_dcp.planners",
        "SaveReport": "manager.manager",
        "Single": "levels.options",
        "StopConditions": "manager.save_policy",
        "Writer": "torch_dcp.writer",
        "Xor": "levels.options",
        "dry_run": "api",
        "load": "api",
        "save": "api",
    }
)
"""Public name -> the module here that has it."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"penstock.checkpoint has no {name!r}. It has: {', '.join(__all__)}.")
    with explained_imports():
        value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
