"""Size limits: modules of 600 lines, classes of 300, functions of 60, and no `except` for everything.

The limits are alarms: what rings wants a better cut, not shorter lines. Run by `make check`.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODULE_LINES = 600
CLASS_LINES = 300
FUNCTION_LINES = 60

CATCH_ALL_ALLOWED = {
    "src/penstock/bench/own_loader/own_loader_loop.py",  # whatever a user's own loader raises
    "src/penstock/checkpoint/levels/redundancy/ring.py",  # a failed member, whose group waits for its blocks
    "src/penstock/cli/app.py",  # the command line's edge
    "src/penstock/cluster/comm.py",  # the gather of all ranks' failures, where all wait for each other
    "src/penstock/cluster/supervision/rank_process.py",  # the same for a rank's whole program
    "src/penstock/results/pages/run_page.py",  # hours of measurement must not end as a failure to draw them
    "src/penstock/submission/check.py",  # a defect of one rule, which must not become a verdict
}


def _broken_limits(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    num_lines = text.count("\n")
    if num_lines > MODULE_LINES:
        yield f"{path}: {num_lines} lines, at most {MODULE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield from _too_long(path, node, CLASS_LINES)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _too_long(path, node, FUNCTION_LINES)
        elif (
            isinstance(node, ast.ExceptHandler) and _catches_all(node) and str(path) not in CATCH_ALL_ALLOWED
        ):
            yield f"{path}:{node.lineno}: catches everything"


def _too_long(
    path: Path, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, limit: int
) -> Iterator[str]:
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if num_lines > limit:
        yield f"{path}:{node.lineno}: {node.name} has {num_lines} lines, at most {limit}"


def _catches_all(handler: ast.ExceptHandler) -> bool:
    name = handler.type.id if isinstance(handler.type, ast.Name) else None
    return handler.type is None or name in ("Exception", "BaseException")


def main() -> int:
    """Print every broken limit; 1 if there is one."""
    broken = [
        line
        for folder in ("src", "tests", "benchmarks", "scripts")
        for path in sorted(Path(folder).rglob("*.py"))
        for line in _broken_limits(path)
    ]
    print("\n".join(broken) or "limits kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
