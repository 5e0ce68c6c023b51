"""The checkpoint engine: a library for training loops, independent of the benchmarks.

    import penstock.checkpoint as pc
    manager = pc.Manager("/pfs/run", keep=3)

Each name is imported on first use, so torch is loaded only when a name that needs it is used.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from penstock.optional_libraries import explained_imports

if TYPE_CHECKING:
    from penstock.checkpoint.api import DryRun, dry_run, load, save
    from penstock.checkpoint.levels.options import DoubleParity, Flush, Partner, Single, Xor
    from penstock.checkpoint.loader import LoadReport
    from penstock.checkpoint.manager.manager import Manager, SaveHandle, SaveReport
    from penstock.checkpoint.manager.policies import Daly, EverySeconds, EverySteps, Overhead, StopConditions
    from penstock.checkpoint.torch_dcp import LoadPlanner, Reader, SavePlanner, Writer

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

_MODULES: Final = MappingProxyType(
    {
        "api": ("DryRun", "dry_run", "load", "save"),
        "levels.options": ("DoubleParity", "Flush", "Partner", "Single", "Xor"),
        "loader": ("LoadReport",),
        "manager.manager": ("Manager", "SaveHandle", "SaveReport"),
        "manager.policies": ("Daly", "EverySeconds", "EverySteps", "Overhead", "StopConditions"),
        "torch_dcp": ("LoadPlanner", "Reader", "SavePlanner", "Writer"),
    }
)
"""The modules of this package, and the public names that each defines."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            with explained_imports():
                value = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = value  # so that the next use does not call this function
            return value
    raise AttributeError(f"penstock.checkpoint has no {name!r}. It has: {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
