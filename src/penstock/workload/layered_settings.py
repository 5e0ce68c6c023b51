"""Nested mappings as flat ones, path by path, in layers, so that every value knows its source.

File, catalog and overrides become layers; a later layer wins. `workload_schema` reads the resulting tree.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.errors import UsageError

KeyPath = tuple[str, ...]


def dotted(path: KeyPath) -> str:
    """`dataset.num_files_train`."""
    return ".".join(path)


def flatten(tree: Mapping[Any, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every leaf with its path; lists are leaves, and an empty mapping says nothing."""
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, Mapping):
            yield from flatten(value, path)
        else:
            yield path, value


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingProblem:
    """What is wrong with the value at `path`."""

    path: KeyPath
    kind: Literal["unknown", "refused"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, and where it was set."""

    value: Any
    source: str
    is_ours: bool = False


@dataclass(slots=True)
class LayeredSettings:
    """Settings by path, layer upon layer."""

    settings: dict[KeyPath, Setting] = field(default_factory=dict)

    def add_layer(self, values: Mapping[KeyPath, Any], *, source: str, is_ours: bool = False) -> None:
        """Put one layer on top. A value replaces what stood at its path, and everything below it."""
        for path, value in sorted(values.items(), key=lambda setting: len(setting[0])):
            self._make_room(path, value, source)
            self.settings[path] = Setting(value, source, is_ours)

    def _make_room(self, path: KeyPath, value: Any, source: str) -> None:
        for below in [known for known in self.settings if known[: len(path)] == path]:
            del self.settings[below]
        for length in range(1, len(path)):
            self._open(path[:length], path, value, source)

    def _open(self, above: KeyPath, path: KeyPath, value: Any, source: str) -> None:
        """A bare time becomes a mapping when a part is set below it; any other value cannot be entered.

        It is the mean of a normal distribution. Of any other one it says nothing, and is replaced.
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
        """The settings as nested mappings."""
        root: dict[str, Any] = {}
        for path, setting in self.settings.items():
            folder = root
            for step in path[:-1]:
                folder = folder.setdefault(step, {})
            folder[path[-1]] = setting.value
        return root

    def source_of(self, path: KeyPath) -> str:
        """Where the value at `path`, above it or below it was set."""
        for length in range(len(path), 0, -1):
            for known, setting in self.settings.items():
                if known[:length] == path[:length]:
                    return setting.source
        return ""
