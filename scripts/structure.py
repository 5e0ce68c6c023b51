"""Figures of the package's structure, and the limits they keep: `make check` runs it.

Counts modules, lines and import lines; finds an import cycle and public classes that share a name; enters the
engine's main acts and counts the modules of the package on their way. Exits with 1 when a limit is broken.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import FrameType

SOURCE = Path(__file__).resolve().parents[1] / "src"

MODULES = 545  # about as many as the capabilities need at 200 lines a module; each new one brings some
IMPORT_LINES_PERCENT = 6.5  # an aim, printed beside the figure: no single change can be held to it
ENTERED = {"pc.save": 40, "Manager.save": 40, "Manager.restore": 40, "penstock checkpoint ls": 30}

# Public classes that share their name on purpose, each with its reason.
SHARED_NAMES: Mapping[str, str] = {}


def parsed_modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in sorted((SOURCE / "penstock").rglob("*.py"))
    }


def import_nodes(tree: ast.Module, *, typing_too: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements of a module, wherever they stand; those for type checkers only if asked."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if typing_too or not is_typing:
            pending.extend(ast.iter_child_nodes(node))


def imports_between(modules: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Which modules each module imports at run time, lazy imports inside functions counted."""
    arrows: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in import_nodes(tree, typing_too=False):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                module = node.module or ""
                targets = [
                    full if (full := f"{module}.{alias.name}") in modules else module for alias in node.names
                ]
            arrows[name] |= {target for target in targets if target in modules and target != name}
    return arrows


def import_cycle(arrows: Mapping[str, set[str]]) -> list[str]:
    """The modules of one import cycle in order, the first one repeated at the end; empty without a cycle."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def shared_class_names(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Public classes that are defined in more than one module."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    return {name: where for name, where in homes.items() if len(where) > 1 and name not in SHARED_NAMES}


class EnteredModules:
    """Notes the modules of the package whose functions are entered while an act runs, on any thread."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._watching = False
        # Threads that outlive an act are watched from their start, so this comes before the first act.
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if self._watching and event == "call" and frame.f_code.co_name != "<module>":
            self._files.add(frame.f_code.co_filename)

    def during(self, act: Callable[[], object]) -> set[str]:
        """The modules that one warm call of `act` enters."""
        act()
        self._files.clear()
        self._watching = True
        sys.setprofile(self._note)
        try:
            act()
        finally:
            sys.setprofile(None)
            self._watching = False
        package = str(SOURCE / "penstock") + os.sep
        # A tree that is reached through a symbolic link is imported by another path than its own.
        files = map(os.path.realpath, self._files)
        found = {name.removeprefix(package) for name in files if name.startswith(package)}
        if not found:
            sys.exit(f"Nothing of {package} was entered: another tree is installed. Run `make check`.")
        return found


def acts(folder: Path) -> Iterator[tuple[str, set[str]]]:
    """The engine's main acts on a tiny state, each with the modules it enters."""
    import torch  # noqa: PLC0415 - as slow to import as all else together

    import penstock.checkpoint as pc  # noqa: PLC0415
    from penstock.cli import main  # noqa: PLC0415

    state = {"weight": torch.zeros(8), "step": 3}
    steps = iter(range(1_000_000))
    entered = EnteredModules()
    yield "pc.save", entered.during(lambda: pc.save(state, str(folder / f"one-{next(steps)}")))
    with pc.Manager(str(folder / "run")) as manager:
        yield "Manager.save", entered.during(lambda: manager.save(next(steps), state))
        yield "Manager.restore", entered.during(lambda: manager.restore(state))
    with contextlib.redirect_stdout(io.StringIO()):
        listing = entered.during(lambda: main(["checkpoint", "ls", str(folder / "run")]))
    yield "penstock checkpoint ls", listing


def main() -> int:
    """Print the figures; 1 if a limit is broken."""
    modules = parsed_modules()
    num_lines = sum(path.read_text(encoding="utf-8").count("\n") for path in SOURCE.rglob("*.py"))
    num_import_lines = sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in modules.values()
        for node in import_nodes(tree, typing_too=True)
    )
    share = 100 * num_import_lines / num_lines
    broken = [
        *_row("modules", len(modules), MODULES),
        *_row("lines", num_lines, None),
    ]
    print(f"{'import lines, % of lines':40} {share:>8.2f} (aim: {IMPORT_LINES_PERCENT})")
    cycle, shared = import_cycle(imports_between(modules)), shared_class_names(modules)
    broken += _row("modules in an import cycle", len(cycle), 0)
    broken += _row("public class names used twice", len(shared), 0)
    if cycle:
        print("   ", " -> ".join(cycle))
    for name, homes in sorted(shared.items()):
        print(f"    {name}: {', '.join(homes)}")
    with tempfile.TemporaryDirectory() as folder:
        for act, entered in acts(Path(folder)):
            broken += _row(f"modules entered by {act}", len(entered), ENTERED[act])
            if "-v" in sys.argv[1:]:
                print("   ", *sorted(entered), sep="\n    ")
    return 1 if broken else 0


def _row(what: str, value: float, limit: float | None) -> list[str]:
    over = limit is not None and value > limit
    print(
        f"{what:40} {value:>8} {'' if limit is None else f'(at most {limit})'}{'  TOO MANY' if over else ''}"
    )
    return [what] if over else []


if __name__ == "__main__":
    # Threads of a process pool or a compiled cache would blur what is counted: a fresh process, nothing else.
    if os.environ.get("PYTHONHASHSEED") is None:
        sys.exit(subprocess.call([sys.executable, *sys.argv], env={**os.environ, "PYTHONHASHSEED": "0"}))
    sys.exit(main())
