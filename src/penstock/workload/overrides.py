"""Changes to a workload from a command line: `dataset.num_files_train=42`, and DLIO's own syntax.

Text to path and value; the meaning of a path is `workload_schema`'s business. The grammar of values is the
part of Hydra's that DLIO's users write: words, numbers, quoted text, [lists] and {mappings}.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.errors import UsageError
from penstock.workload import layered_settings, spec

_KEY: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_INTEGER: Final = re.compile(r"[+-]?\d+(_\d+)*")
_FLOAT: Final = re.compile(r"[+-]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WORDS: Final = {"null": None, "true": True, "false": False}
_ENDS: Final = {"[": "]", "{": "}"}
_OUTERMOST: Final = ","


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One value to set. `source` is the text it came from, for messages."""

    path: layered_settings.KeyPath
    value: Any
    source: str

    def tree(self) -> dict[str, Any]:
        """The path as nested mappings, with the value at their end."""
        tree = self.value
        for step in reversed(self.path):
            tree = {step: tree}
        assert isinstance(tree, dict)
        return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class DlioWords:
    """What a command line of `dlio_benchmark` asks for; None where it does not say, "" where it says null."""

    workload: str | None = None
    overrides: tuple[Override, ...] = ()
    config_dir: Path | None = None
    run_dir: str | None = None
    output_subdir: str | None = None


def parse_settings(texts: Iterable[str]) -> tuple[Override, ...]:
    """The values of repeated `--set` options; of one path the last wins when they are laid."""
    return tuple(_override(text, source=f"--set {text}") for text in texts)


def parse_dlio_words(words: Sequence[str]) -> DlioWords:
    """A command line of `dlio_benchmark`: `workload=NAME ++workload.a.b=v hydra.run.dir=D --config-dir D`."""
    given: dict[str, str] = {}
    overrides = []
    config_dir = None
    for word in _joined(words):
        bare = word.lstrip("+")
        name, equals, value = bare.partition("=")
        if name == "--config-dir":
            config_dir = Path(value)  # an option, not an override: no grammar, no quotes
        elif word.startswith("~workload.") and not equals:  # hydra's word for leaving out a key
            overrides.append(_override(f"{bare.removeprefix('~workload.')}=null", source=word))
        elif equals and name.startswith("workload."):
            overrides.append(_override(bare.removeprefix("workload."), source=word))
        elif equals and name in _DLIO_FIELDS:
            read = parse_value(value, source=word)
            given[_DLIO_FIELDS[name]] = "" if read is None else str(read)
        else:
            what = next((text for known, text in _REFUSED.items() if name in known), "is not understood")
            raise UsageError(f"{word!r} {what}", fix=_DLIO_USAGE)
    return DlioWords(**given, config_dir=config_dir, overrides=tuple(overrides))


_DLIO_FIELDS: Final = {
    "workload": "workload",
    "hydra.run.dir": "run_dir",
    "hydra.output_subdir": "output_subdir",
}
_DLIO_USAGE: Final = (
    "Write workload=NAME, ++workload.SECTION.KEY=VALUE, ~workload.SECTION.KEY, hydra.run.dir=FOLDER, "
    "hydra.output_subdir=NAME, or --config-dir FOLDER."
)


_REFUSED: Final = {
    (
        "-m",
        "--multirun",
    ): "would start several runs: write a command for each, or use `penstock training sweep`",
    ("-cp", "--config-path", "-cn", "--config-name"): (
        "replaces hydra's own configuration: name a folder of workloads by --config-dir"
    ),
}


def _joined(words: Sequence[str]) -> Iterator[str]:
    """Words, with `--config-dir FOLDER` and `-cd FOLDER` made one."""
    remaining = iter(words)
    for word in remaining:
        if word in ("--config-dir", "-cd"):
            folder = next(remaining, None)
            if folder is None:
                raise UsageError(f"{word} names no folder", fix=_DLIO_USAGE)
            yield f"--config-dir={folder}"
        else:
            yield word


def _override(text: str, *, source: str) -> Override:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{source!r} sets nothing", fix="Write SECTION.KEY=VALUE.")
    if not _KEY.fullmatch(key.strip()):
        raise UsageError(f"{key!r} is not a key", where=source, fix="Write SECTION.KEY=VALUE.")
    path = tuple(key.strip().split("."))
    if path[-1] in spec.SECRET_NAMES:
        return _secret(path, value, source=f"{source.removesuffix(value)}...")
    return Override(path=path, value=parse_value(value, source=source), source=source)


def _secret(path: layered_settings.KeyPath, value: str, *, source: str) -> Override:
    """An override whose value no message may quote."""
    try:
        return Override(path=path, value=parse_value(value, source=source), source=source)
    except UsageError:
        raise UsageError("A secret cannot be read", where=source, fix="Put it in quotes.") from None


def parse_value(text: str, *, source: str) -> Any:
    """The value that `text` writes; sizes and times stay text, because only their key knows the kind."""
    return _Scanner(text.strip(), source).whole()


def format_value(value: Any) -> str:
    """The shortest text that `parse_value` reads as `value`."""
    if isinstance(value, str):
        return value if _reads_bare(value) else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, Mapping):
        inner = ",".join(f"{format_value(str(key))}:{format_value(entry)}" for key, entry in value.items())
        return "{" + inner + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(format_value, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _reads_bare(text: str) -> bool:
    plain = text == text.strip() and not set(text) & set("[]{},:'\"\\")
    return bool(text) and plain and isinstance(_primitive(text), str)


def _primitive(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


class _Scanner:
    """Reads one value from left to right."""

    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._at = 0

    def whole(self) -> Any:
        """The one value that all of the text is."""
        value = self._value(ends=_OUTERMOST)
        if self._next() == ",":
            raise self._error(
                "several values, separated by commas", "Write a list as [a,b], or quote the text."
            )
        if self._next():
            raise self._error(f"text after its end: {self._text[self._at :]!r}", "Quote the whole value.")
        return value

    def _value(self, ends: str) -> Any:
        opening = self._next()
        if opening == "[":
            return list(self._elements(opening))
        if opening == "{":
            return dict(self._elements(opening))
        if opening and opening in "'\"":
            return self._quoted()
        text = self._bare(ends)
        if not text and ends != _OUTERMOST:
            raise self._error("an empty value", "Write '' for an empty text.")
        return _primitive(text)

    def _elements(self, opening: str) -> Iterator[Any]:
        """Values between brackets; of a mapping, keys and values as pairs."""
        closing = _ENDS[opening]
        self._at += 1
        while self._next() != closing:
            if opening == "{":
                key = self._key()
                yield key, self._value(ends=f",{closing}")
            else:
                yield self._value(ends=f",{closing}")
            if self._next() not in (",", closing):
                raise self._error(f"no {closing!r}", "Close the bracket.")
            if self._next() == ",":
                self._at += 1
        self._at += 1

    def _key(self) -> str:
        quoted = self._next() and self._next() in "'\""
        key = self._quoted() if quoted else self._bare(ends=":,}")
        if self._next() != ":":
            raise self._error(f"no ':' after {key!r}", "Write a mapping as {key:value}.")
        self._at += 1
        return key

    def _bare(self, ends: str) -> str:
        self._next()
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in ends:
            self._at += 1
        return self._text[start : self._at].strip()

    def _quoted(self) -> str:
        quote = self._text[self._at]
        self._at += 1
        characters = []
        while self._at < len(self._text) and self._text[self._at] != quote:
            if self._text[self._at] == "\\" and self._text[self._at + 1 : self._at + 2] in (quote, "\\"):
                self._at += 1
            characters.append(self._text[self._at])
            self._at += 1
        if self._at >= len(self._text):
            raise self._error(f"no closing {quote}", "Close the quotes.")
        self._at += 1
        return "".join(characters)

    def _next(self) -> str:
        """The next character that is not a space, or "" at the end."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _error(self, what: str, fix: str) -> UsageError:
        return UsageError(f"{self._text!r} has {what}", where=self._source, fix=fix)
