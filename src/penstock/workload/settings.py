"""The settings of a workload: values by path, in layers, and the text with which a command line sets them.

File, catalog and overrides become layers; a later layer wins, and every value records its source. Overrides
are `dataset.num_files_train=42`, or a command line of DLIO's. The grammar of their values is the part of
Hydra's that DLIO's users write: words, numbers, quoted text, [lists] and {mappings}. `spec` defines what a
path means.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import UsageError
from penstock.workload.spec import SECRET_NAMES, KeyPath


def dotted(path: KeyPath) -> str:
    """Return a path as text, as in `dataset.num_files_train`."""
    return ".".join(path)


def flatten(tree: Mapping[Any, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every leaf with its path. Lists are leaves, and an empty mapping sets nothing."""
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            yield from flatten(value, path)
        else:
            yield path, value


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, and where it was set; `is_ours` marks values that Penstock ships."""

    value: Any
    source: str
    is_ours: bool = False


class LayeredSettings:
    """Settings by path, layer upon layer."""

    def __init__(self) -> None:
        self.settings: dict[KeyPath, Setting] = {}

    def add_layer(self, values: Mapping[KeyPath, Any], *, source: str, is_ours: bool = False) -> None:
        """Put one layer on top. A value replaces any value at its path, and everything below it."""
        for path, value in sorted(values.items(), key=lambda setting: len(setting[0])):
            for below in [known for known in self.settings if known[: len(path)] == path]:
                del self.settings[below]
            for length in range(1, len(path)):
                self._open(path[:length], path, value, source)
            self.settings[path] = Setting(value, source, is_ours)

    def _open(self, above: KeyPath, path: KeyPath, value: Any, source: str) -> None:
        """Make room for `path` below a value at `above`; raise `UsageError` unless it is null or a time.

        For a normal distribution, the bare time becomes the mean. For any other, it has no meaning and is
        removed.
        """
        standing = self.settings.get(above)
        if standing is None:
            return
        if standing.value is not None and not above[-1].endswith("_time"):
            raise UsageError(
                f"{dotted(path)} cannot be set: {dotted(above)} is {standing.value!r}, which has no parts",
                where=source,
                fix=f"Set {dotted(above)} itself.",
            )
        del self.settings[above]
        is_normal = path[-1] in ("mean", "stdev") or (path[-1] == "type" and value in ("normal", "fixed"))
        if standing.value is not None and is_normal:
            self.settings[*above, "mean"] = standing

    def tree(self) -> dict[str, Any]:
        """Return the settings as nested mappings."""
        root: dict[str, Any] = {}
        for path, setting in self.settings.items():
            folder = root
            for step in path[:-1]:
                folder = folder.setdefault(step, {})
            folder[path[-1]] = setting.value
        return root

    def source_of(self, path: KeyPath) -> str:
        """Return the source of the value at `path`, above it or below it; "" if there is none."""
        for length in range(len(path), 0, -1):
            for known, setting in self.settings.items():
                if known[:length] == path[:length]:
                    return setting.source
        return ""


_KEY: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_INTEGER: Final = re.compile(r"[+-]?\d+(_\d+)*")
_FLOAT: Final = re.compile(r"[+-]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WORDS: Final = {"null": None, "true": True, "false": False}
_ENDS: Final = {"[": "]", "{": "}"}
_OUTERMOST: Final = ","


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One value to set. `source` is the text that sets it, for messages."""

    path: KeyPath
    value: Any
    source: str

    def tree(self) -> dict[str, Any]:
        """Return the path as nested mappings, with the value innermost."""
        tree = self.value
        for step in reversed(self.path):
            tree = {step: tree}
        assert isinstance(tree, dict)
        return tree


def parse_settings(texts: Iterable[str]) -> tuple[Override, ...]:
    """Return the values of repeated `--set` options."""
    return tuple(_override(text, source=f"--set {text}") for text in texts)


def parse_dlio_words(words: Sequence[str]) -> tuple[tuple[Override, ...], dict[str, str]]:
    """Parse a command of `dlio_benchmark`: `workload=NAME ++workload.a.b=v hydra.run.dir=D --config-dir D`.

    Returns the overrides, and the other words by name; a null becomes "".
    """
    given: dict[str, str] = {}
    overrides = []
    remaining = iter(words)
    for word in remaining:
        bare = word.lstrip("+")
        name, equals, value = bare.partition("=")
        if word in ("--config-dir", "-cd"):
            folder = next(remaining, None)
            if folder is None:
                raise UsageError(f"{word} names no folder", fix=_DLIO_USAGE)
            given["--config-dir"] = folder
        elif name == "--config-dir":
            given[name] = value  # an option rather than an override: no grammar, no quotes
        elif word.startswith("~workload.") and not equals:  # hydra's syntax for leaving out a key
            overrides.append(_override(f"{bare.removeprefix('~workload.')}=null", source=word))
        elif equals and name.startswith("workload."):
            overrides.append(_override(bare.removeprefix("workload."), source=word))
        elif equals and name in ("workload", "hydra.run.dir", "hydra.output_subdir"):
            read = parse_value(value, source=word)
            given[name] = "" if read is None else str(read)
        else:
            raise UsageError(f"{word!r} {_REFUSED.get(name, 'is not understood')}", fix=_DLIO_USAGE)
    return tuple(overrides), given


_DLIO_USAGE: Final = (
    "Write workload=NAME, ++workload.SECTION.KEY=VALUE, ~workload.SECTION.KEY, hydra.run.dir=FOLDER, "
    "hydra.output_subdir=NAME, or --config-dir FOLDER."
)


_MULTIRUN: Final = "would start several runs: write a command for each, or use `penstock training sweep`"
_CONFIG: Final = "replaces hydra's own configuration: name a folder of workloads with --config-dir"
_REFUSED: Final = dict.fromkeys(("-m", "--multirun"), _MULTIRUN) | dict.fromkeys(
    ("-cp", "--config-path", "-cn", "--config-name"), _CONFIG
)


def _override(text: str, *, source: str) -> Override:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{source!r} sets nothing", fix="Write SECTION.KEY=VALUE.")
    if not _KEY.fullmatch(key.strip()):
        raise UsageError(f"{key!r} is not a key", where=source, fix="Write SECTION.KEY=VALUE.")
    path = tuple(key.strip().split("."))
    is_secret = path[-1] in SECRET_NAMES
    if is_secret:
        source = f"{source.removesuffix(value)}..."
    try:
        return Override(path=path, value=parse_value(value, source=source), source=source)
    except UsageError:
        if not is_secret:  # no message may quote a secret's value
            raise
        raise UsageError("A secret cannot be read", where=source, fix="Put it in quotes.") from None


def parse_value(text: str, *, source: str) -> Any:
    """Return the value of `text`.

    Sizes and times remain text, because only their key determines which of them it is.
    """
    scanner = _Scanner(text.strip(), source)
    value = scanner.value(ends=_OUTERMOST)
    if scanner.peek() == ",":
        raise scanner.error(
            "several values, separated by commas", "Write a list as [a,b], or quote the text."
        )
    if scanner.peek():
        raise scanner.error(f"text after the value: {scanner.text[scanner.at :]!r}", "Quote the whole value.")
    return value


def format_value(value: Any) -> str:
    """Return the shortest text that `parse_value` reads as `value`."""
    if isinstance(value, str):
        is_plain = value and value == value.strip() and not set(value) & set("[]{},:'\"\\")
        if is_plain and isinstance(_primitive(value), str):
            return value
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, Mapping):
        inner = ",".join(f"{format_value(str(key))}:{format_value(entry)}" for key, entry in value.items())
        return "{" + inner + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(format_value, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _primitive(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


class _Scanner:
    """Reads one value from left to right."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self._source = source
        self.at = 0

    def value(self, ends: str) -> Any:
        """Return the value that begins here."""
        opening = self.peek()
        if opening == "[":
            return list(self._elements(opening))
        if opening == "{":
            return dict(self._elements(opening))
        if opening and opening in "'\"":
            return self._quoted()
        text = self._bare(ends)
        if not text and ends != _OUTERMOST:
            raise self.error("an empty value", "Write '' for an empty string.")
        return _primitive(text)

    def _elements(self, opening: str) -> Iterator[Any]:
        """Yield the values between brackets; for a mapping, pairs of keys and values."""
        closing = _ENDS[opening]
        self.at += 1
        while self.peek() != closing:
            if opening == "{":
                key = self._key()
                yield key, self.value(ends=f",{closing}")
            else:
                yield self.value(ends=f",{closing}")
            if self.peek() not in (",", closing):
                raise self.error(f"no {closing!r}", "Close the bracket.")
            if self.peek() == ",":
                self.at += 1
        self.at += 1

    def _key(self) -> str:
        quoted = self.peek() and self.peek() in "'\""
        key = self._quoted() if quoted else self._bare(ends=":,}")
        if self.peek() != ":":
            raise self.error(f"no ':' after {key!r}", "Write a mapping as {key:value}.")
        self.at += 1
        return key

    def _bare(self, ends: str) -> str:
        found = re.compile(rf"\s*([^{re.escape(ends)}]*)").match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return found[1].strip()

    def _quoted(self) -> str:
        quote = self.text[self.at]
        # A backslash escapes the quote or itself; before any other character, it stands for itself.
        found = re.compile(rf"{quote}((?:\\[{quote}\\]|[^{quote}])*+){quote}").match(self.text, self.at)
        if found is None:
            raise self.error(f"no closing {quote}", "Close the quotes.")
        self.at = found.end()
        return re.sub(rf"\\([{quote}\\])", r"\1", found[1])

    def peek(self) -> str:
        """Return the next character that is not a space, or "" at the end."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def error(self, what: str, fix: str) -> UsageError:
        """Return the error for the text that is being read."""
        return UsageError(f"{self.text!r} has {what}", where=self._source, fix=fix)
