"""The description of synthetic traces: runs of ranks, their patterns of calls, and how long those take.

Invariant: a description fixes every byte of the traces; nothing is random.
"""

from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from penstock.errors import UsageError
from penstock.trace.compare.trace_study import YamlDocument, load_document, parse_document

Count = Annotated[int, Field(ge=0)]
Ranks = Literal["all", "others"] | tuple[Count, ...]
"""Which ranks: listed ones, all, or those of the run that no earlier entry of the same list has."""


class Call(YamlDocument):
    """Calls of one operation: one for each of `sizes`, or for each chunk of `total_bytes`, or `count`."""

    op: str
    cat: str = "POSIX"
    count: Count | None = None
    sizes: tuple[Count, ...] = ()
    total_bytes: Count = 0
    chunk_bytes: Annotated[int, Field(gt=0)] | None = None
    lane: str = "main"
    is_pathless: bool = False
    is_stamped: bool = False

    def num_bytes_each(self) -> list[int | None]:
        """The size of each call, None for calls that move no bytes."""
        if self.sizes:
            return [*self.sizes]
        if self.chunk_bytes:
            whole, rest = divmod(self.total_bytes, self.chunk_bytes)
            return [*([self.chunk_bytes] * whole), *([rest] if rest else [])]
        return [None] * (1 if self.count is None else self.count)


class Pattern(YamlDocument):
    """The calls on one file. Its path may contain {copy}, {step}, {epoch}, {rank}, {host} and places."""

    path: str = ""
    copies: Annotated[int, Field(gt=0)] = 1
    calls: tuple[Call, ...]


class ThreadLane(YamlDocument):
    """When and where calls happen: after a checkpoint begins, on the main thread or on new threads."""

    after_us: Count = 0
    threads: Count = 0


class PatternUse(YamlDocument):
    """A pattern that ranks do in each checkpoint or once; `fixed_us`: times by file name and operation."""

    pattern: str
    ranks: Ranks = "all"
    is_once: bool = False
    at: dict[str, str] = Field(default_factory=dict)
    omit: tuple[str, ...] = ()
    fixed_us: dict[str, dict[str, list[Count]]] = Field(default_factory=dict)


class TimeBudget(YamlDocument):
    """How long calls take over the whole run, to the microsecond: by rank, and for each of the `others`.

    A call belongs to the first budget that names its pattern and operation; without one it takes a
    microsecond.
    """

    patterns: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    us: dict[int | Literal["others"], Count]


class CheckpointTimes(YamlDocument):
    """The steps and start times of checkpoints."""

    steps: tuple[Count, ...] = (0,)
    epoch: Count = 1
    first_us: Count = 0
    every_us: Count = 1_000_000


class FileDamage(YamlDocument):
    """A damage to the trace file of one rank; `line` counts its events from 0, negative ones from the end."""

    kind: Literal[
        "control_characters",
        "bad_utf8",
        "cut_line",
        "garbage_line",
        "truncated_gzip",
        "no_opening",
        "no_closing",
        "two_members",
        "plain_text",
        "empty_file",
    ]
    rank: Count = 0
    line: int = -1


class Run(YamlDocument):
    """One job: its ranks, in blocks on its hosts, and what they do."""

    ranks: Annotated[int, Field(gt=0)] = 1
    world: int | None = None
    hosts: tuple[str, ...] = ("host0",)
    start_us: Count = 1_700_000_000_000_000
    checkpoints: CheckpointTimes = CheckpointTimes()
    places: dict[str, str] = Field(default_factory=dict)
    does: tuple[PatternUse, ...]
    budgets: tuple[TimeBudget, ...] = ()
    damage: tuple[FileDamage, ...] = ()

    def host_of(self, rank: int) -> str:
        """The host of a rank: blocks of ranks by host, as `srun` distributes them."""
        each = -(-(self.world or self.ranks) // len(self.hosts))
        return self.hosts[min(rank // each, len(self.hosts) - 1)]


class SynthesisSpec(YamlDocument):
    """A set of runs. `compare` is written beside the traces, ready for `penstock trace compare`."""

    generation: Literal[1, 2, 3] = 3
    patterns: dict[str, Pattern]
    lanes: dict[str, ThreadLane] = Field(default_factory=dict)
    runs: dict[str, Run]
    compare: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        for name, run in self.runs.items():
            if len(set(run.hosts)) > run.ranks:
                raise ValueError(f"run {name} has more hosts than ranks")
            for use in run.does:
                if use.pattern not in self.patterns:
                    known = ", ".join(self.patterns)
                    raise ValueError(
                        f"run {name} has the unknown pattern {use.pattern!r}; choose from: {known}"
                    )
        lanes = {"main", *self.lanes}
        for pattern_name, pattern in self.patterns.items():
            for call in pattern.calls:
                if call.lane not in lanes:
                    raise ValueError(f"pattern {pattern_name} has the unknown lane {call.lane!r}")
        return self


def shipped_names() -> list[str]:
    """Names of the descriptions that come with the package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _shipped().iterdir())


def read_description(name_or_path: str) -> SynthesisSpec:
    """Read a shipped description by its name, or one from a file."""
    if name_or_path in shipped_names():
        text = _shipped().joinpath(f"{name_or_path}.yaml").read_text(encoding="utf-8")
        return parse_document(SynthesisSpec, text, source=name_or_path)
    path = Path(name_or_path)
    if not path.exists():
        raise UsageError(
            f"Neither a file nor a shipped description: {name_or_path!r}",
            fix=f"Name a YAML file, or one of the shipped: {', '.join(shipped_names())}.",
        )
    return load_document(SynthesisSpec, path)


def _shipped() -> Any:
    return resources.files("tests.support.synthesize") / "shipped"
