"""Names of runs that were given as paths: each is called after its folder or file.

Raw trace files of one folder are one run, because tracers write a file for each process; a folder, a glob and
an event table are a run each, and so is what has a name of its own, as in `base=traces/monday`.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from penstock.trace.event_table import read_facts

_NAMED: Final = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)
_ENDINGS: Final = re.compile(r"(\.(pfw|gz|json|txt|strace|events|parquet|darshan|zst))+$")


def name_runs(given: Sequence[str]) -> dict[str, str | tuple[str, ...]]:
    """The patterns of each run, by its name, in the order in which runs were first given."""
    groups: dict[tuple[str, str], list[str]] = {}
    for text in given:
        named = _NAMED.fullmatch(text)
        if named and not Path(text).exists():
            groups.setdefault(("named", named[1]), []).append(named[2])
            continue
        path = Path(text)
        is_own = not path.is_file() or read_facts(path) is not None
        groups.setdefault(("path", text) if is_own else ("folder", str(path.parent)), []).append(text)
    names = dict(
        zip(groups, _tell_apart([_propose(kind, of, groups[kind, of]) for kind, of in groups]), strict=True)
    )
    return {names[key]: tuple(patterns) for key, patterns in groups.items()}


def _propose(kind: str, of: str, patterns: Sequence[str]) -> list[str]:
    """Names for a run, each longer than the one before."""
    if kind == "named":
        return [of]
    if len(patterns) == 1:
        path = Path(patterns[0])
        own = re.sub(r"[*?\[\]{}]+", "", _ENDINGS.sub("", path.name)).strip("._-")
        parents = [part for part in path.absolute().parent.parts if not re.search(r"[*?\[]", part)]
    else:
        path = Path(of).absolute()
        own, parents = path.name, list(path.parent.parts)
    if not own:
        own = parents.pop() if parents else ""
    parts = [*(part.strip("/") for part in parents), own]
    parts = [part for part in parts if part] or ["run"]
    return ["/".join(parts[-depth:]) for depth in range(1, len(parts) + 1)]


def _tell_apart(proposals: Sequence[Sequence[str]]) -> Iterator[str]:
    """The shortest name of each that no other run could have, or a numbered one."""
    taken: set[str] = set()
    for number, names in enumerate(proposals):
        others = {name for other, some in enumerate(proposals) if other != number for name in some}
        name = next((name for name in names if name not in others | taken), f"{names[0]} {number + 1}")
        if len(names) == 1 and names[0] not in taken:
            name = names[0]
        taken.add(name)
        yield name
