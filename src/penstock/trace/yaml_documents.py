"""YAML documents that people write about traces, read into strict models.

Invariant: an unknown key is an error that gives its place and the nearest known key.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.did_you_mean import nearest
from penstock.errors import UsageError
from penstock.workload.strict_yaml import parse_yaml


class YamlDocument(BaseModel):
    """A section of such a document: immutable, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


AnyDocument = TypeVar("AnyDocument", bound=YamlDocument)


def load_document(model: type[AnyDocument], path: Path) -> AnyDocument:
    """Read and validate a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"Cannot read {path}: {error}", fix="Check that it is a readable YAML file."
        ) from error
    return parse_document(model, text, source=str(path))


def parse_document(model: type[AnyDocument], text: str, *, source: str) -> AnyDocument:
    """Validate YAML text; `source` is its name in errors."""
    tree = parse_yaml(text, source=source, kind="A description of runs", page="trace")
    try:
        return model.model_validate(tree)
    except ValidationError as refused:
        problems = [_problem(model, error) for error in refused.errors(include_url=False)]
        raise UsageError("; ".join(problems), where=source, fix="See `penstock docs trace`.") from refused


def _problem(model: type[YamlDocument], error: Any) -> str:
    path = tuple(error["loc"])
    shown = ".".join(str(step) for step in path) or "the document"
    if error["type"] == "extra_forbidden":
        known = sorted(_keys_at(model, path[:-1]))
        meant = nearest(str(path[-1]), known, cutoff=0.5)
        return f"unknown key {shown}: " + (
            f"did you mean {meant}?" if meant else f"known here: {', '.join(known)}"
        )
    if error["type"] == "missing":
        return f"{shown} is missing"
    return f"{shown} is {error['input']!r:.60}: {error['msg'].removeprefix('Value error, ')}"


def _keys_at(model: type[YamlDocument], path: Sequence[Any]) -> list[str]:
    """The keys of the section at `path`; steps that are not fields (list positions, names) are skipped."""
    here: type[YamlDocument] | None = model
    for step in path:
        fields = here.model_fields if here else {}
        if step in fields:
            here = _section_in(fields[step].annotation)
    return [entry.alias or name for name, entry in here.model_fields.items()] if here else []


def _section_in(annotation: Any) -> type[YamlDocument] | None:
    if isinstance(annotation, type) and issubclass(annotation, YamlDocument):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)
