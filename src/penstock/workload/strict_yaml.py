"""YAML text as plain values: safe, and with an error for a key that occurs twice in one mapping."""

import itertools
import re
from collections.abc import Hashable
from typing import Any, Final

import yaml

from penstock.errors import UsageError

_FAST_NESTING: Final = 2000
"""libyaml ends the process somewhere above 20,000 levels, on a stack of 8 MiB."""
_MAX_DIGITS: Final = 1000
"""Longer numbers are refused: converting them takes quadratic time in base 60, and many cannot be printed."""
_BLOCK_PREFIX: Final = re.compile(r"^[-?: \t]+", re.MULTILINE)


class _UniqueKeys:
    """A mixin for YAML loaders: refuses a key that occurs twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - the loader's signature
        loader: Any = super()
        known: set[Hashable] = set()
        for key_node, _ in node.value:
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the loader itself refuses it
            if key in known:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            known.add(key)
        mapping: dict[Hashable, Any] = loader.construct_mapping(node, deep)
        return mapping


class _PlainLoader(_UniqueKeys, yaml.SafeLoader):
    """PyYAML's loader in Python, which raises RecursionError if documents nest too deeply."""


_FAST_LOADER: Final[Any] = type(
    "FastLoader", (_UniqueKeys, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), {}
)
"""The loader of libyaml, seven times as fast. It recurses on the C stack, so brackets alone could end the
process.
"""


def construct_value(loader: Any, node: yaml.Node) -> Any:
    """Construct a number, time or Boolean; raise `ValueError` if it is too long or invalid."""
    kind, line = node.tag.rpartition(":")[2], node.start_mark.line + 1
    if len(node.value) > _MAX_DIGITS:
        raise ValueError(f"line {line} has a number of {len(node.value):,} digits")
    try:
        return getattr(loader, f"construct_yaml_{kind}")(node)
    except (ArithmeticError, AttributeError, LookupError) as error:
        raise ValueError(f"line {line}: {node.value!r:.60} is not a valid {kind}") from error


def limit_values(*loaders: Any) -> None:
    """Make these YAML loaders construct numbers, times and Booleans with `construct_value`."""
    for loader, kind in itertools.product(loaders, ("bool", "float", "int", "timestamp")):
        loader.add_constructor(f"tag:yaml.org,2002:{kind}", construct_value)


limit_values(_PlainLoader, _FAST_LOADER)


def parse_yaml(
    text: str, *, source: str, kind: str = "A workload", page: str = "workloads"
) -> dict[str, Any]:
    """Return the mapping in `text`. Errors name `source`, and the page that describes such documents."""
    # Each bracket and each column of indentation opens at most one level.
    block_levels = max(map(len, _BLOCK_PREFIX.findall(text)), default=0)
    may_nest_deeply = text.count("[") + text.count("{") + block_levels > _FAST_NESTING
    try:
        tree = yaml.load(text, Loader=_PlainLoader if may_nest_deeply else _FAST_LOADER)  # noqa: S506 - safe
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"Not YAML: {error.problem}", where=f"{source}{line}") from error
    except (yaml.YAMLError, ValueError) as error:  # such as impossible dates
        raise UsageError(f"Not YAML: {str(error).splitlines()[0]}", where=source) from error
    except RecursionError as error:
        raise UsageError("This YAML cannot be read: it is nested too deeply", where=source) from error
    if not isinstance(tree, dict):
        raise UsageError(
            f"{kind} is a mapping of sections, not {tree!r:.60}",
            where=source,
            fix=f"See `penstock docs {page}`.",
        )
    return tree
