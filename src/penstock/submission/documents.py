"""One file of a submission as a document: JSON, YAML or text; what cannot be read says so when it is asked.

Place in the flow: below `reading` and `surroundings`. Invariant: nothing here raises for what a file holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.submission.facts import Document, Steps

MOST_TEXT_BYTES: Final = 4 << 20
"""So much of a log is read; what a rule looks for stands at its beginning."""
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def relative(path: Path, base: Path) -> str:
    """How findings name a file."""
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)


def read_document(path: Path, base: Path) -> Document:
    """The file as values, or as one text where it is neither JSON nor YAML."""
    return read_file(str(path), relative(path, base))


def read_file(path: str, file: str) -> Document:
    """The same, where its name is known."""
    try:
        return Document(file=file, tree=_parse(path))
    except FileNotFoundError:
        return Document(file=file, problem="there is no such file")
    except OSError as error:
        return Document(file=file, problem=f"cannot be read: {error.strerror}")
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Document(file=file, problem=f"cannot be understood: {first}")


def read_description(path: Path, base: Path) -> Document:
    """A YAML file with the line of each of its values, for those who wrote it by hand."""
    document = read_document(path, base)
    if document.problem:
        return document
    root = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=_LOADER)
    lines = dict(_lines(root, ())) if root is not None else {}
    return Document(file=document.file, tree=document.tree, lines=lines)


def _lines(node: yaml.Node, above: Steps) -> Iterator[tuple[Steps, int]]:
    yield above, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*above, str(key.value))
            yield from _lines(value, here)
            yield here, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _lines(value, (*above, str(number)))


def _parse(path: str) -> Any:
    if path.endswith(".json"):
        with open(path, encoding="utf-8-sig") as stream:  # noqa: PTH123 - thousands of files: a Path costs more
            return json.loads(stream.read())
    if path.endswith((".yaml", ".yml")):
        with open(path, encoding="utf-8-sig") as stream:  # noqa: PTH123 - likewise
            return yaml.load(stream.read(), Loader=_LOADER)  # noqa: S506 - both are safe
    with open(path, encoding="utf-8", errors="replace") as stream:  # noqa: PTH123 - likewise
        return stream.read(MOST_TEXT_BYTES)
