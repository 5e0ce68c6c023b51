"""The arguments of mlpstorage's command lines, v2 and v3, parsed by a table of its options.

Place in the flow: words -> `MlpstorageCommand` -> `mlpstorage`. Pure. Invariant: an unknown word
is an error that suggests the nearest; nothing is ignored in silence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from penstock.did_you_mean import did_you_mean
from penstock.errors import UsageError


class Takes(StrEnum):
    """The values that an option takes."""

    NOTHING = "nothing"
    ONE = "one value"
    SOME = "values up to the next option"
    MANY = "values up to the next option, and again"


@dataclass(frozen=True, slots=True)
class KnownOption:
    """An option of mlpstorage's, its values, and why penstock ignores it ("": it does not)."""

    names: tuple[str, ...]
    takes: Takes = Takes.ONE
    why_ignored: str = ""

    @property
    def name(self) -> str:
        """The first name, without dashes."""
        return self.names[0].lstrip("-")


_OWN_LOGS = "penstock prints what matters on stderr"

OPTIONS: Final = (
    KnownOption(("--results-dir", "-rd")),
    KnownOption(("--systemname", "-sn", "--system-name")),
    KnownOption(("--config-file", "-c")),
    KnownOption(("--data-dir", "-dd")),
    KnownOption(("--model", "-m")),
    KnownOption(("--accelerator-type", "-at", "-g")),
    KnownOption(("--num-accelerators", "-na", "-n")),
    KnownOption(("--max-accelerators", "-ma")),
    KnownOption(("--num-processes", "-np")),
    KnownOption(("--client-host-memory-in-gb", "-cm")),
    KnownOption(("--num-client-hosts", "-nc")),
    KnownOption(("--hosts", "-s"), Takes.SOME),
    KnownOption(("--exec-type", "-et")),
    KnownOption(("--params", "-p", "--param"), Takes.MANY),
    KnownOption(("--mpi-bin",)),
    KnownOption(("--mpi-params",), Takes.MANY),
    KnownOption(("--oversubscribe",), Takes.NOTHING),
    KnownOption(("--allow-run-as-root",), Takes.NOTHING),
    KnownOption(("--checkpoint-folder", "-cf")),
    KnownOption(("--num-checkpoints-read", "-ncr")),
    KnownOption(("--num-checkpoints-write", "-ncw")),
    KnownOption(("--checkpoint-subset",), Takes.NOTHING),
    KnownOption(("--o-direct",), Takes.NOTHING),
    KnownOption(("--loops",)),
    KnownOption(("--open",), Takes.NOTHING),
    KnownOption(("--closed",), Takes.NOTHING),
    KnownOption(("--dry-run",), Takes.NOTHING),
    KnownOption(("--what-if",), Takes.NOTHING),
    KnownOption(("--skip-fs-separation-gate",), Takes.NOTHING),
    KnownOption(("--id", "-i")),
    KnownOption(("--limit",)),
    KnownOption(("--debug",), Takes.NOTHING, _OWN_LOGS),
    KnownOption(("--verbose",), Takes.NOTHING, _OWN_LOGS),
    KnownOption(("--quiet",), Takes.NOTHING, _OWN_LOGS),
    KnownOption(("--stream-log-level",), Takes.ONE, _OWN_LOGS),
    KnownOption(("--color",), Takes.ONE, "colours follow the terminal"),
    KnownOption(("--mpi-btl",), Takes.ONE, "ranks exchange no data through MPI's byte transports"),
    KnownOption(("--dlio-bin-path", "-dp"), Takes.ONE, "DLIO is not run"),
    KnownOption(("--allow-invalid-params", "-aip"), Takes.NOTHING, "an unknown parameter is always an error"),
    KnownOption(("--skip-validation",), Takes.NOTHING, "every run is validated before it begins"),
    KnownOption(("--verify-lockfile",), Takes.ONE, "run.json holds the versions of all packages"),
    KnownOption(("--skip-timeseries",), Takes.NOTHING, "counters cost under half a percent"),
    KnownOption(("--timeseries-interval",), Takes.ONE, "counters are read every second"),
    KnownOption(("--max-timeseries-samples",), Takes.ONE, "counters are thinned out automatically"),
    KnownOption(("--cluster-collector-shared-staging",), Takes.ONE, "nothing is staged on hosts"),
)
"""Every known option; all others are errors."""

_BY_NAME: Final[Mapping[str, KnownOption]] = MappingProxyType(
    {name: known for known in OPTIONS for name in known.names}
)
MODES: Final = ("closed", "open", "whatif")
BENCHMARKS: Final = ("training", "checkpointing")
UNSUPPORTED_BENCHMARKS: Final = ("vectordb", "kvcache")
PHASES: Final = ("datasize", "datagen", "run", "configview")
OTHER_COMMANDS: Final = (
    "init", "reports", "history", "runs", "validate", "rules-coverage", "lockfile", "version",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpstorageCommand:
    """A parsed command line. `mode` is "" in v2's form without a division; `rest` are further arguments."""

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

    def value(self, name: str) -> str | None:
        """The last value of an option; None if it was not given."""
        return self.options[name][-1] if self.options.get(name) else None

    def number(self, name: str) -> int | None:
        """The value as a whole number."""
        text = self.value(name)
        if text is not None and not text.isdecimal():
            raise UsageError(f"{text!r} is not a whole number", where=f"--{name}", fix="Write digits.")
        return None if text is None else int(text)

    def ignored(self) -> tuple[str, ...]:
        """Remarks on the options that are ignored, one for each."""
        ignored = [known for known in OPTIONS if known.why_ignored and known.name in self.options]
        return tuple(f"{known.names[0]} is ignored: {known.why_ignored}" for known in ignored)


def parse(
    words: Sequence[str], *, defaults: Mapping[str, tuple[str, ...]] | None = None
) -> MlpstorageCommand:
    """Parse a command line; its options take precedence over `defaults`, those of a file."""
    unsupported = next((word for word in words[:2] if word in UNSUPPORTED_BENCHMARKS), None)
    if unsupported is not None:  # its options are not known here, so do not parse them
        return MlpstorageCommand(benchmark=unsupported, command="run")
    positional, own_options = _split(words)
    options = {**(defaults or {}), **own_options}
    if not positional:
        raise UsageError("No command is given", fix="penstock-mlpstorage --help shows the forms.")
    first = positional[0]
    if first in MODES:
        return _modal(first, positional[1:], options)
    if first in BENCHMARKS:
        return _flat(first, positional[1:], options)
    if first in OTHER_COMMANDS:
        return MlpstorageCommand(command=first, rest=tuple(positional[1:]), options=options)
    raise _unknown(first, (*MODES, *BENCHMARKS, *OTHER_COMMANDS))


def known_option(word: str) -> KnownOption:
    """The option of this name; raises UsageError with the nearest name."""
    if word not in _BY_NAME:
        raise _unknown(word, tuple(_BY_NAME))
    return _BY_NAME[word]


def _modal(mode: str, words: Sequence[str], options: Mapping[str, tuple[str, ...]]) -> MlpstorageCommand:
    """Parse v3's form: the division, the benchmark, the model, the command, file or object."""
    benchmark = _require_word(words, 0, BENCHMARKS, "benchmark")
    rest = list(words[1:])
    model = rest.pop(0) if rest and rest[0] not in PHASES else ""
    command = _require_word(rest, 0, PHASES, "command")
    storage = rest[1] if len(rest) > 1 else ""
    if storage not in ("", "file", "object"):
        raise _unknown(storage, ("file", "object"))
    _require_no_more(rest[2:])
    return MlpstorageCommand(
        mode=mode, benchmark=benchmark, command=command, model=model, storage=storage, options=options
    )


def _flat(benchmark: str, words: Sequence[str], options: Mapping[str, tuple[str, ...]]) -> MlpstorageCommand:
    """Parse v2's form: the benchmark and the command; options name the division and the model."""
    command = _require_word(words, 0, PHASES, "command")
    _require_no_more(words[1:])
    modes = [mode for mode in ("closed", "open") if mode in options]
    if len(modes) > 1:
        raise UsageError(
            "--closed and --open are mutually exclusive", where=benchmark, fix="Leave one of them out."
        )
    model = options.get("model", ("",))[-1]
    return MlpstorageCommand(
        mode=modes[0] if modes else "", benchmark=benchmark, command=command, model=model, options=options
    )


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Positional words, and options with their values."""
    positional: list[str] = []
    options: dict[str, tuple[str, ...]] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("-") or word == "-":
            positional.append(word)
            continue
        name, equals, value = word.partition("=")
        known = known_option(name)
        values = (value,) if equals else _values(known, name, remaining)
        before = options.get(known.name, ()) if known.takes is Takes.MANY else ()
        options[known.name] = (*before, *values)
    return positional, options


def _values(known: KnownOption, name: str, remaining: list[str]) -> tuple[str, ...]:
    if known.takes is Takes.NOTHING:
        return ()
    if not remaining or remaining[0].startswith("--"):
        raise UsageError(f"{name} needs a value", fix=f"Write {name} VALUE.")
    if known.takes is Takes.ONE:
        return (remaining.pop(0),)
    values = []
    while remaining and not remaining[0].startswith("-"):
        values.append(remaining.pop(0))
    return tuple(values)


def _require_word(words: Sequence[str], place: int, allowed: tuple[str, ...], what: str) -> str:
    if len(words) <= place:
        raise UsageError(f"No {what} is named", fix=f"Write one of: {', '.join(allowed)}.")
    if words[place] not in allowed:
        raise _unknown(words[place], allowed)
    return words[place]


def _require_no_more(words: Sequence[str]) -> None:
    if words:
        raise UsageError(
            f"{words[0]!r} is not a known word", fix="penstock-mlpstorage --help shows the forms."
        )


def _unknown(word: str, allowed: tuple[str, ...]) -> UsageError:
    return UsageError(
        f"{word!r} is not a known word",
        fix=f"{did_you_mean(word, allowed)}penstock-mlpstorage --help shows the forms.",
    )
