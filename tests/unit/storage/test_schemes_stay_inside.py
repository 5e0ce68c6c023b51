"""Outside of `penstock.storage` no code branches on the text of a URI: callers ask for capabilities.

A back end that another package registers could otherwise never work like a built-in one.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

PACKAGE = Path(penstock.__file__).parent

ALLOWED = {
    # What DLIO's and mlpstorage's command lines mean by their own words, before there is a storage.
    "cli/dlio_storage.py": "storage.uri_scheme, buckets and folders of DLIO's configuration",
    "cli/mlpstorage.py": "--o-direct and --object make URIs of plain folders",
    # Text that was written by an earlier run, perhaps elsewhere: there is no storage to ask.
    "results/provenance.py": "secrets are cut out of URIs",
    "submission/rules/dataset_rules.py": "a path in the arguments of a submitted run",
    "submission/rules/query_rules.py": "a path in the arguments of a submitted run",
}

WORDS = re.compile(r"scheme|SCHEMES|://")
SCHEME_TEXT = re.compile(r"(file|direct|s3|gs|az|mem)?://")


def decisions(tree: ast.AST) -> Iterator[int]:
    """Lines that look at the scheme of a URI: `location.scheme`, `"://" in x`, `x.startswith("file://")`."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="scheme", value=ast.Name(id=name)) if "location" in name:
                yield node.lineno
            case ast.Attribute(attr="scheme", value=ast.Call(func=ast.Name(id="parse_uri"))):
                yield node.lineno
            case ast.Name(id=name) | ast.alias(name=name) if name.endswith(
                ("FILE_SCHEMES", "OBJECT_SCHEMES")
            ):
                yield node.lineno
            case ast.Compare(left=left, comparators=comparators):
                if any(map(_is_scheme_text, [left, *comparators])):
                    yield node.lineno
            case ast.Call(func=ast.Attribute(attr="startswith" | "partition" | "removeprefix"), args=args):
                if any(map(_is_scheme_text, args)):
                    yield node.lineno


def _is_scheme_text(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and SCHEME_TEXT.fullmatch(node.value) is not None
    )


def modules() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(("storage/", "testing/")):
            yield name


@pytest.mark.parametrize(
    ("code", "is_decision"),
    [
        ("if location.scheme == 'file': pass", True),
        ("parse_uri(text).scheme in ('file', 'direct')", True),
        ("from penstock.storage.uri import FILE_SCHEMES", True),
        ("storage.uri.startswith('direct://')", True),
        ("'://' in text", True),
        ("uri.partition('://')", True),
        ("record.scheme == 'partner'", False),
        ("uri = f'file://{folder}'", False),
        ("find_local_root(storage) is None", False),
    ],
)
def test_the_search_knows_a_decision(code: str, *, is_decision: bool) -> None:
    assert bool(list(decisions(ast.parse(code)))) is is_decision


def test_no_module_outside_storage_looks_at_a_scheme() -> None:
    found = {
        f"{name}:{line}"
        for name in modules()
        if name not in ALLOWED
        for text in [(PACKAGE / name).read_text(encoding="utf-8")]
        if WORDS.search(text)  # most modules need no parsing
        for line in decisions(ast.parse(text))
    }
    assert not found, "ask penstock.storage.capabilities instead"


def test_every_exception_is_needed() -> None:
    needless = {
        name
        for name in ALLOWED
        if not (PACKAGE / name).exists()
        or not list(decisions(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))))
    }
    assert not needless
