"""The words of mlpstorage's command lines, v2 and v3, as one record; options are known by a table.

Place in the flow: words -> `Asked` -> `mlpstorage_plan`. Pure. Invariant: a word that no form knows is an
error that names the nearest; nothing is passed over in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from penstock.errors import UsageError
from penstock.suggest import did_you_mean


class Takes(StrEnum):
    """What stands behind an option."""

    NOTHING = "nothing"
    ONE = "one value"
    SOME = "values up to the next option"
    MANY = "values up to the next option, and again"


@dataclass(frozen=True, slots=True)
class Known:
    """An option: its names, what it takes, and why it means nothing here ("": it means something)."""

    names: tuple[str, ...]
    takes: Takes = Takes.ONE
    idle: str = ""

    @property
    def name(self) -> str:
        """What it is called here: the first name, without dashes."""
        return self.names[0].lstrip("-")


_MEASURED = "memory and hosts are measured by the ranks themselves"
_OWN_LOGS = "penstock says what matters on stderr"

OPTIONS: Final = (
    Known(("--results-dir", "-rd")),
    Known(("--systemname", "-sn", "--system-name")),
    Known(("--config-file", "-c")),
    Known(("--data-dir", "-dd")),
    Known(("--model", "-m")),
    Known(("--accelerator-type", "-at", "-g")),
    Known(("--num-accelerators", "-na", "-n")),
    Known(("--max-accelerators", "-ma")),
    Known(("--num-processes", "-np")),
    Known(("--client-host-memory-in-gb", "-cm")),
    Known(("--num-client-hosts", "-nc")),
    Known(("--hosts", "-s"), Takes.SOME),
    Known(("--exec-type", "-et")),
    Known(("--params", "-p", "--param"), Takes.MANY),
    Known(("--mpi-bin",)),
    Known(("--mpi-params",), Takes.MANY),
    Known(("--oversubscribe",), Takes.NOTHING),
    Known(("--allow-run-as-root",), Takes.NOTHING),
    Known(("--checkpoint-folder", "-cf")),
    Known(("--num-checkpoints-read", "-ncr")),
    Known(("--num-checkpoints-write", "-ncw")),
    Known(("--checkpoint-subset",), Takes.NOTHING),
    Known(("--o-direct",), Takes.NOTHING),
    Known(("--loops",)),
    Known(("--open",), Takes.NOTHING),
    Known(("--closed",), Takes.NOTHING),
    Known(("--dry-run",), Takes.NOTHING),
    Known(("--what-if",), Takes.NOTHING),
    Known(("--skip-fs-separation-gate",), Takes.NOTHING),
    Known(("--id", "-i")),
    Known(("--limit",)),
    Known(("--debug",), Takes.NOTHING, _OWN_LOGS),
    Known(("--verbose",), Takes.NOTHING, _OWN_LOGS),
    Known(("--quiet",), Takes.NOTHING, _OWN_LOGS),
    Known(("--stream-log-level",), Takes.ONE, _OWN_LOGS),
    Known(("--color",), Takes.ONE, "colours follow the terminal"),
    Known(("--mpi-btl",), Takes.ONE, "ranks exchange no data through MPI's byte transports"),
    Known(("--dlio-bin-path", "-dp"), Takes.ONE, "no program of DLIO's is run"),
    Known(("--allow-invalid-params", "-aip"), Takes.NOTHING, "an unknown parameter is always an error"),
    Known(("--skip-validation",), Takes.NOTHING, "what runs has been understood before it begins"),
    Known(("--verify-lockfile",), Takes.ONE, "run.json holds the versions of all packages"),
    Known(("--skip-timeseries",), Takes.NOTHING, "counters cost under half a percent"),
    Known(("--timeseries-interval",), Takes.ONE, "counters are read every second"),
    Known(("--max-timeseries-samples",), Takes.ONE, "counters are thinned out by themselves"),
    Known(("--cluster-collector-shared-staging",), Takes.ONE, "nothing is staged on hosts"),
)
"""Every option that is understood; the rest is refused."""

_BY_NAME: Final[Mapping[str, Known]] = MappingProxyType(
    {name: known for known in OPTIONS for name in known.names}
)
MODES: Final = ("closed", "open", "whatif")
BENCHMARKS: Final = ("training", "checkpointing")
ELSEWHERE: Final = ("vectordb", "kvcache")
PHASES: Final = ("datasize", "datagen", "run", "configview")
OTHER_COMMANDS: Final = (
    "init", "reports", "history", "runs", "validate", "rules-coverage", "lockfile", "version",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A command line, understood. `mode` is "" in v2's form without a division; `rest` are other words."""

    mode: str = ""
    benchmark: str = ""
    command: str
    model: str = ""
    storage: str = ""
    rest: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether an option was given."""
        return name in self.options

    def one(self, name: str) -> str | None:
        """The value of an option, the last one given."""
        return self.options[name][-1] if self.options.get(name) else None

    def number(self, name: str) -> int | None:
        """The value as a whole number."""
        text = self.one(name)
        if text is not None and not text.isdecimal():
            raise UsageError(f"{text!r} is no whole number", where=f"--{name}", fix="Write digits.")
        return None if text is None else int(text)

    def idle(self) -> tuple[str, ...]:
        """Why options mean nothing here, each said once."""
        given = [known for known in OPTIONS if known.idle and known.name in self.options]
        return tuple(f"{known.names[0]} means nothing here: {known.idle}" for known in given)


def parse(words: Sequence[str], *, defaults: Mapping[str, tuple[str, ...]] | None = None) -> Asked:
    """The command line; `defaults` are options of a file, which those of the line overrule."""
    refused = next((word for word in words[:2] if word in ELSEWHERE), None)
    if refused is not None:  # whatever its options are: nobody here knows them
        return Asked(benchmark=refused, command="run")
    plain, given = _split(words)
    options = {**(defaults or {}), **given}
    if not plain:
        raise UsageError("Nothing says what to do", fix="penstock-mlpstorage --help shows the forms.")
    first = plain[0]
    if first in MODES:
        return _modal(first, plain[1:], options)
    if first in BENCHMARKS:
        return _flat(first, plain[1:], options)
    if first in OTHER_COMMANDS:
        return Asked(command=first, rest=tuple(plain[1:]), options=options)
    raise _unknown(first, (*MODES, *BENCHMARKS, *OTHER_COMMANDS))


def known_option(word: str) -> Known:
    """The option of this name; `UsageError` that tells the nearest."""
    if word not in _BY_NAME:
        raise _unknown(word, tuple(_BY_NAME))
    return _BY_NAME[word]


def _modal(mode: str, words: Sequence[str], options: Mapping[str, tuple[str, ...]]) -> Asked:
    """v3: the division, the benchmark, the model, the command, file or object."""
    benchmark = _taken(words, 0, BENCHMARKS, "benchmark")
    rest = list(words[1:])
    model = rest.pop(0) if rest and rest[0] not in PHASES else ""
    command = _taken(rest, 0, PHASES, "command")
    storage = rest[1] if len(rest) > 1 else ""
    if storage not in ("", "file", "object"):
        raise _unknown(storage, ("file", "object"))
    _require_no_more(rest[2:])
    return Asked(
        mode=mode, benchmark=benchmark, command=command, model=model, storage=storage, options=options
    )


def _flat(benchmark: str, words: Sequence[str], options: Mapping[str, tuple[str, ...]]) -> Asked:
    """v2: the benchmark and the command; flags name the division and the model."""
    command = _taken(words, 0, PHASES, "command")
    _require_no_more(words[1:])
    modes = [mode for mode in ("closed", "open") if mode in options]
    if len(modes) > 1:
        raise UsageError("A run is of one division", where="--closed --open", fix="Leave one of them out.")
    model = options.get("model", ("",))[-1]
    return Asked(
        mode=modes[0] if modes else "", benchmark=benchmark, command=command, model=model, options=options
    )


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Plain words, and options with their values."""
    plain: list[str] = []
    options: dict[str, tuple[str, ...]] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("-") or word == "-":
            plain.append(word)
            continue
        name, equals, value = word.partition("=")
        known = known_option(name)
        values = (value,) if equals else _values(known, name, remaining)
        before = options.get(known.name, ()) if known.takes is Takes.MANY else ()
        options[known.name] = (*before, *values)
    return plain, options


def _values(known: Known, name: str, remaining: list[str]) -> tuple[str, ...]:
    if known.takes is Takes.NOTHING:
        return ()
    if not remaining or remaining[0].startswith("--"):
        raise UsageError(f"{name} names nothing", fix=f"Write {name} VALUE.")
    if known.takes is Takes.ONE:
        return (remaining.pop(0),)
    values = []
    while remaining and not remaining[0].startswith("-"):
        values.append(remaining.pop(0))
    return tuple(values)


def _taken(words: Sequence[str], place: int, among: tuple[str, ...], what: str) -> str:
    if len(words) <= place:
        raise UsageError(f"No {what} is named", fix=f"Write one of: {', '.join(among)}.")
    if words[place] not in among:
        raise _unknown(words[place], among)
    return words[place]


def _require_no_more(words: Sequence[str]) -> None:
    if words:
        raise UsageError(f"{words[0]!r} is not understood", fix="penstock-mlpstorage --help shows the forms.")


def _unknown(word: str, among: tuple[str, ...]) -> UsageError:
    return UsageError(
        f"{word!r} is not understood",
        fix=f"{did_you_mean(word, among)}penstock-mlpstorage --help shows the forms.",
    )
