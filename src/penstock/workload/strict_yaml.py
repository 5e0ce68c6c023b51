"""YAML text as plain values: safe, and with an error for a key that occurs twice in one mapping."""

from collections.abc import Hashable
from typing import Any

import yaml

from penstock.errors import UsageError


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - the base class's signature
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, *, source: str) -> dict[str, Any]:
    """The mapping that `text` holds; `source` is what errors call it."""
    try:
        tree = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - it is a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"Not YAML: {error.problem}", where=f"{source}{line}") from error
    if not isinstance(tree, dict):
        raise UsageError(
            f"A workload is a mapping of sections, not {tree!r:.60}",
            where=source,
            fix="See docs/workloads.md.",
        )
    return tree
