"""The size and shape of the package, and the limits they keep: `make check` runs it.

Counts what cannot be met by reformatting: statements, expressions, record types, protocols, tiny functions.
Finds import cycles (imports for type checkers count) and words that this project's English avoids. Runs the
main acts and counts the modules they enter. Exits with 1 when a limit is broken.

    python scripts/structure.py            every figure, with its limit
    python scripts/structure.py --packages the same by package; runs no act
    python scripts/structure.py -v         names the modules entered, the protocols, the tiny functions
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"

LIMITS = {
    "statements": 44_007,
    "expressions": 307_935,
    "record types": 395,
    "modules": 326,
    "protocols": 21,
    "functions of three lines or less": 896,
    "modules in an import cycle": 0,
    "public class names used twice": 0,
    "broad except clauses outside the list": 0,
    "places of avoided English": 0,
}
ENTERED = {
    "pc.save": 27,
    "Manager.save": 25,
    "Manager.restore": 26,
    "penstock checkpoint ls": 23,
    "penstock trace summary": 18,
    "penstock training run": 87,
}

BROAD_EXCEPT = {
    "bench/loader/native_loader.py": "a reading thread's failure, which is raised where its batch is awaited",
    "bench/own_loader/own_loader_run.py": "whatever a user's own loader or step raises",
    "bench/own_loader/user_code.py": "whatever a user's own factory raises",
    "checkpoint/levels/protection.py": "a failed member, whose group waits for its blocks",
    "cli/app.py": "the command line's edge",
    "cluster/comm.py": "the gather of all ranks' failures, where all wait for each other",
    "cluster/supervision/rank_process.py": "the same for a rank's whole program",
    "results/run_page.py": "hours of measurement must not end as a failure to draw them",
    "submission/check.py": "a defect of one rule, which must not become a verdict",
}

# Words of another language's syntax, each with what a native speaker writes instead.
AVOIDED_WORDS: Mapping[str, str] = {
    "anew": "again",
    "are told": "are reported",
    "beside": "next to, as well as",
    "by whichever": "any",
    "is said": "is reported",
    "is told": "is reported, learns",
    "nowhere": "not anywhere",
    "so many": "name what is counted",
}
# Participles and pronouns do not say what kind of thing a name holds.
AVOIDED_NAMES = frozenset({"heard", "met", "said", "seen", "those", "told", "wishes"})
# A docstring begins with a noun or an imperative.
AVOIDED_BEGINNINGS = frozenset({"How", "Of", "What", "Whether", "Which", "Whose"})


def parsed_modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in sorted((SOURCE / "penstock").rglob("*.py"))
    }


def is_docstring(node: ast.AST) -> bool:
    """A bare constant: a docstring, or the text below a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_record(node: ast.AST) -> bool:
    """A dataclass, NamedTuple or pydantic-free TypedDict: a type whose job is to hold fields."""
    return isinstance(node, ast.ClassDef) and (
        any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        or any("NamedTuple" in ast.unparse(base) for base in node.bases)
    )


def is_protocol(node: ast.AST) -> bool:
    """A `typing.Protocol`."""
    return isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)


def is_tiny(node: ast.AST) -> bool:
    """A function of at most three lines, its docstring and decorators aside."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return (node.end_lineno or node.lineno) - node.lineno + 1 <= 3


def count(trees: Mapping[str, ast.Module]) -> dict[str, int]:
    """The sizes of some modules."""
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    return {
        "statements": sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes),
        "expressions": sum(isinstance(node, ast.expr) for node in nodes),
        "record types": sum(map(is_record, nodes)),
        "modules": len(trees),
        "protocols": sum(map(is_protocol, nodes)),
        "functions of three lines or less": sum(map(is_tiny, nodes)),
    }


def imports_between(modules: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Which modules each module imports: at run time, inside functions, or for type checkers."""
    arrows: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                targets = [
                    full if (full := f"{module}.{alias.name}") in modules else module for alias in node.names
                ]
            else:
                continue
            arrows[name] |= {target for target in targets if target in modules and target != name}
    return arrows


def import_cycles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(arrows[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in arrows:
        if name not in index:
            visit(name)
    return found


def shared_class_names(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Public classes that are defined in more than one module."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    return {name: where for name, where in homes.items() if len(where) > 1}


def broad_excepts(modules: Mapping[str, ast.Module]) -> list[str]:
    """`except Exception` and wider, where `BROAD_EXCEPT` has no reason for it."""
    places = []
    for name, tree in modules.items():
        path = name.removeprefix("penstock.").replace(".", "/") + ".py"
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = node.type.id if isinstance(node.type, ast.Name) else None
            if (node.type is None or caught in ("Exception", "BaseException")) and path not in BROAD_EXCEPT:
                places.append(f"{path}:{node.lineno}")
    return places


def avoided_words(modules: Mapping[str, ast.Module]) -> list[str]:
    """Where texts, names and docstrings use English that this project avoids."""
    pattern = re.compile(r"\b(" + "|".join(AVOIDED_WORDS) + r")\b", re.IGNORECASE)
    texts = [*SOURCE.rglob("*.py"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    places = [
        f"{path.relative_to(ROOT)}:{number}: {found[0]} ({AVOIDED_WORDS[found[0].lower()]})"
        for path in sorted(texts)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (found := pattern.search(line))
    ]
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in AVOIDED_NAMES:
                places.append(f"{module}:{node.lineno}: the name {node.id}")
            if isinstance(node, ast.arg) and node.arg in AVOIDED_NAMES:
                places.append(f"{module}:{node.lineno}: the parameter {node.arg}")
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "-").split(maxsplit=1)[0]
                if first in AVOIDED_BEGINNINGS:
                    places.append(f"{module}:{node.lineno}: a docstring that begins with {first}")
    return places


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
    """The main acts on tiny inputs, each with the modules it enters."""
    import torch  # noqa: PLC0415 - as slow to import as all else together

    import penstock.checkpoint as pc  # noqa: PLC0415
    from penstock.cli import main  # noqa: PLC0415

    state = {"weight": torch.zeros(8), "step": 3}
    steps = iter(range(1_000_000))
    entered = EnteredModules()

    def run(*words: str) -> Callable[[], object]:
        def call() -> None:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                code = main(list(words))
            if code:
                sys.exit(f"`penstock {' '.join(words)}` ended with {code}")

        return call

    yield "pc.save", entered.during(lambda: pc.save(state, str(folder / f"one-{next(steps)}")))
    with pc.Manager(str(folder / "run")) as manager:
        yield "Manager.save", entered.during(lambda: manager.save(next(steps), state))
        yield "Manager.restore", entered.during(lambda: manager.restore(state))
    yield "penstock checkpoint ls", entered.during(run("checkpoint", "ls", str(folder / "run")))
    trace = folder / "trace.pfw"
    trace.write_text(
        '{"name":"read","cat":"POSIX","pid":1,"tid":1,"ts":5,"dur":2,"ph":"X","args":{"ret":9}}\n'
    )
    yield "penstock trace summary", entered.during(run("trace", "summary", str(trace)))
    data = ["--data", str(folder / "data"), "--set", "dataset.num_files_train=14"]
    data += ["--set", "dataset.record_length_bytes=4KiB", "--set", "dataset.record_length_bytes_stdev=0"]
    run("training", "generate", "unet3d", *data)()
    # Whatever the storage of this machine: the run counts, not its verdict.
    training = [*data, "--accelerator", "h100", "--results", str(folder / "runs"), "--set", "metric.au=0"]
    training += ["--set", "train.epochs=1", "--set", "train.computation_time=0.001"]
    yield "penstock training run", entered.during(run("training", "run", "unet3d", *training))


def main() -> int:
    """Print the figures; 1 if a limit is broken."""
    modules = parsed_modules()
    if "--packages" in sys.argv[1:]:
        return _print_packages(modules)
    is_verbose = "-v" in sys.argv[1:]
    cycles = import_cycles(imports_between(modules))
    shared = shared_class_names(modules)
    broad = broad_excepts(modules)
    words = avoided_words(modules)
    figures = {
        **count(modules),
        "modules in an import cycle": sum(map(len, cycles)),
        "public class names used twice": len(shared),
        "broad except clauses outside the list": len(broad),
        "places of avoided English": len(words),
    }
    broken = [what for what, value in figures.items() if not _keeps(what, value, LIMITS.get(what))]
    for cycle in cycles:
        print("    cycle:", ", ".join(name.removeprefix("penstock.") for name in cycle))
    for name, homes in sorted(shared.items()):
        print(f"    {name}: {', '.join(homes)}")
    for place in [*broad, *(words if is_verbose else words[:20])]:
        print("   ", place)
    with tempfile.TemporaryDirectory() as folder:
        for act, entered in acts(Path(folder)):
            if not _keeps(f"modules entered by {act}", len(entered), ENTERED[act]):
                broken.append(act)
            if is_verbose:
                print("   ", *sorted(entered), sep="\n    ")
    return 1 if broken else 0


def _keeps(what: str, value: int, limit: int | None) -> bool:
    over = limit is not None and value > limit
    bound = "" if limit is None else f"(at most {limit:,})"
    print(f"{what:40} {value:>9,} {bound}{'  TOO MANY' if over else ''}")
    return not over


def _print_packages(modules: Mapping[str, ast.Module]) -> int:
    depth = 2 if "--deep" in sys.argv[1:] else 1
    packages: dict[str, dict[str, ast.Module]] = defaultdict(dict)
    for name, tree in modules.items():
        path = SOURCE / name.replace(".", "/")
        parts = name.split(".")[1:] if path.is_dir() else name.split(".")[1:-1]
        packages["/".join(parts[:depth]) or "(root)"][name] = tree
    print(f"{'':24}{'statements':>12}{'records':>9}{'modules':>9}{'protocols':>11}{'tiny':>7}{'lines':>9}")
    for package, trees in sorted(packages.items()):
        sizes = list(count(trees).values())
        files = (
            path / "__init__.py"
            if (path := SOURCE / name.replace(".", "/")).is_dir()
            else path.with_suffix(".py")
            for name in trees
        )
        lines = sum(file.read_text(encoding="utf-8").count("\n") for file in files)
        print(f"{package:24}{sizes[0]:>12,}{sizes[2]:>9}{sizes[3]:>9}{sizes[4]:>11}{sizes[5]:>7}{lines:>9,}")
    return 0


if __name__ == "__main__":
    # Threads of a process pool or a compiled cache would blur what is counted: a fresh process, nothing else.
    if os.environ.get("PYTHONHASHSEED") is None:
        sys.exit(subprocess.call([sys.executable, *sys.argv], env={**os.environ, "PYTHONHASHSEED": "0"}))
    sys.exit(main())
