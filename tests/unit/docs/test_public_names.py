"""Every public name has a docstring, and every parameter of it is named there or has one of its own."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from scripts.docs_hooks import PUBLIC, public_names

USED = ("penstock.checkpoint", "penstock.storage", "penstock.trace")
NAMES = [(module, name) for module in USED for name in public_names(module)]


def described_attributes(kind: type) -> set[str]:
    """The fields of a class that have a string below them."""
    found = set()
    for base in kind.__mro__[:-1]:
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):
            continue
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                found.add(ast.unparse(field.target))
    return found


def callables(name: str, value: Any) -> Iterator[tuple[str, Any, str]]:
    """The value and, of a class, its public methods; each with the documentation that speaks of it."""
    about = inspect.getdoc(value) or ""
    yield name, value, about
    if inspect.isclass(value):
        for method, function in vars(value).items():
            is_inherited = any(hasattr(base, method) for base in value.__mro__[1:])  # torch describes its own
            if not method.startswith("_") and inspect.isfunction(function) and not is_inherited:
                yield f"{name}.{method}", function, about + (inspect.getdoc(function) or "")


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_public_name_and_its_parameters_are_described(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    if not callable(value) or not (inspect.isclass(value) or inspect.isfunction(value)):
        return
    lacking = []
    for place, function, about in callables(name, value):
        if not inspect.getdoc(function):
            lacking.append(place)
        attributes = described_attributes(function) if inspect.isclass(function) else set()
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:
            continue
        for parameter in parameters:
            is_named = re.search(rf"`[^`]*\b{re.escape(parameter.name)}\b[^`]*`", about)
            is_self = parameter.name in ("self", "cls", "args", "kwargs") or parameter.name.startswith("_")
            if not (is_self or is_named or parameter.name in attributes):
                lacking.append(f"{place}({parameter.name})")
    assert lacking == []


@pytest.mark.parametrize("module", PUBLIC)
def test_every_name_of_a_public_module_has_a_docstring(module: str) -> None:
    values = {name: getattr(importlib.import_module(module), name) for name in public_names(module)}
    defined = {
        name: value for name, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)
    }
    assert [name for name, value in defined.items() if not inspect.getdoc(value)] == []
    assert defined
