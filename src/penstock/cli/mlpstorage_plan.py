"""What mlpstorage's command lines come to: command lines of penstock, and remarks on what is done otherwise.

Place in the flow: `Asked` -> `Plan` -> the command line's own entry. Pure. Invariant: nothing that was asked
for is left undone without a remark or an error.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.cli.mlpstorage_words import Asked

_OTHERS: Final[Mapping[str, str]] = MappingProxyType(
    {"vectordb": "Vector search", "kvcache": "The key-value cache benchmark"}
)
_DEFAULT_ROOT: Final = "mlpstorage-results"
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a plan depends on besides words: where results go by default, and whether a folder is claimed."""

    results: str | None
    system: str | None
    data: str | None
    checkpoints: str | None
    bucket: str | None
    is_claimed: Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One command line of penstock, without the program's name, and what to say before it."""

    words: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The command as one could type it."""
        return shlex.join(("penstock", *self.words))


def plan(asked: Asked, around: Surroundings) -> Plan:
    """The command for these words."""
    if asked.benchmark in _OTHERS:
        raise UsageError(
            f"{_OTHERS[asked.benchmark]} is not measured by Penstock",
            where=asked.benchmark,
            fix="It measures training and checkpointing; run the others with mlpstorage itself.",
        )
    if asked.benchmark:
        planner = _Planner(asked, around)
        words = planner.training() if asked.benchmark == "training" else planner.checkpointing()
        return Plan(words=tuple(words), remarks=(*asked.idle(), *planner.remarks))
    return Plan(words=tuple(_other(asked, around)), remarks=asked.idle())


class _Planner:
    """One benchmark's command; `remarks` grow on the way."""

    def __init__(self, asked: Asked, around: Surroundings) -> None:
        self.asked = asked
        self.remarks: list[str] = []
        self.results = asked.one("results-dir") or around.results or "."
        self.system = asked.one("systemname") or around.system
        self.around = around
        self.is_handed_in = (
            asked.mode in ("closed", "open") and bool(self.system) and around.is_claimed(self.results)
        )
        if asked.command not in ("datasize", "configview"):
            self._remark_on_places()

    def training(self) -> list[str]:
        """`training datasize`, `datagen`, `run`, `configview`."""
        workload = self._workload()
        command = self.asked.command
        if command == "datasize":
            return self._datasize(workload)
        if command == "configview":
            return ["workloads", *workload, *self._settings()]
        data = ["--data", self._data()]
        if command == "datagen":
            ranks = self._ranks("num-processes")
            if self.is_handed_in:
                return ["submission", "run", "training", *workload, "--only", "datagen", *data,
                        *self._settings(), *self._handed_in(), *ranks]  # fmt: skip
            return ["training", "generate", *workload, *data, *self._settings(), *ranks]
        ranks = self._ranks("num-accelerators")
        if self.is_handed_in:
            return ["submission", "run", "training", *workload, "--only", "run", *data,
                    *self._settings(), *self._handed_in(), *ranks]  # fmt: skip
        division = [f"--{self.asked.mode}"] if self.asked.mode in ("closed", "open") else []
        return ["training", "run", *workload, *data, *self._settings(), "--results", self.results,
                *division, *self._skipped(), *ranks]  # fmt: skip

    def checkpointing(self) -> list[str]:
        """`checkpointing datasize`, `run`, `configview`."""
        asked = self.asked
        model = self._model()
        if asked.command == "datagen":
            raise UsageError("Checkpoints need no data set", where="datagen", fix="Use run.")
        if asked.command == "configview":
            return ["workloads", model, *self._settings()]
        ranks = asked.number("num-processes")
        if asked.command == "datasize":
            return ["checkpoint", "size", model, *(["--ranks", str(ranks)] if ranks else [])]
        folder = asked.one("checkpoint-folder") or self.around.checkpoints
        if folder is None:
            raise UsageError("Nothing says where checkpoints go", fix="Give --checkpoint-folder FOLDER.")
        words = ["checkpoint", "run", model, "--to", self._place(folder), *self._settings()]
        for name, option in (("num-checkpoints-write", "--writes"), ("num-checkpoints-read", "--reads")):
            if asked.number(name) is not None:
                words += [option, str(asked.number(name))]
        words += ["--subset"] if asked.has("checkpoint-subset") else []
        if self.is_handed_in:
            accelerator = asked.one("accelerator-type")
            words += [*(["--accelerator", accelerator] if accelerator else []), *self._handed_in()]
        else:
            words += ["--results", self.results, *self._skipped()]
        return [*words, *self._ranks("num-processes")]

    def _datasize(self, workload: list[str]) -> list[str]:
        asked = self.asked
        number = asked.number("max-accelerators") or asked.number("num-accelerators")
        memory = asked.number("client-host-memory-in-gb")
        if number is None or memory is None:
            raise UsageError(
                "A data set's size follows from accelerators and memory",
                where="datasize",
                fix="Give --max-accelerators N and --client-host-memory-in-gb GIB.",
            )
        hosts = asked.number("num-client-hosts") or max(1, len(self._hosts()))
        self.remarks.append("the size of the data set enters the submission with the first run")
        return ["training", "size", *workload, *self._settings(), "--accelerators", str(number),
                "--hosts", str(hosts), "--host-memory", f"{memory}GiB"]  # fmt: skip

    def _workload(self) -> list[str]:
        accelerator = self.asked.one("accelerator-type")
        return [self._model(), *(["--accelerator", accelerator] if accelerator else [])]

    def _model(self) -> str:
        if not self.asked.model:
            raise UsageError("No model is named", fix="Write it behind the benchmark, or --model NAME.")
        return self.asked.model

    def _settings(self) -> list[str]:
        return [word for text in self.asked.options.get("params", ()) for word in ("--set", text)]

    def _data(self) -> str:
        folder = self.asked.one("data-dir") or self.around.data
        if folder is None:
            raise UsageError("Nothing says where the data set lies", fix="Give --data-dir FOLDER.")
        place = self._place(folder)
        return f"direct://{place}" if self.asked.has("o-direct") and "://" not in place else place

    def _place(self, folder: str) -> str:
        """A folder of the model's own in `folder`, which is a prefix in the bucket for `object`."""
        below = f"{folder.rstrip('/')}/{self._model()}"
        if self.asked.storage != "object" or "://" in folder:
            return below
        if not self.around.bucket:
            raise UsageError("Nothing says which bucket it is", where="object", fix="Export BUCKET=name.")
        return f"s3://{self.around.bucket}/{below.lstrip('/')}"

    def _handed_in(self) -> list[str]:
        assert self.system is not None
        handed = [f"--{self.asked.mode}", "--submission", self.results, "--system", self.system]
        return [*handed, *self._skipped()]

    def _skipped(self) -> list[str]:
        return ["--skip-gate", "apart"] if self.asked.has("skip-fs-separation-gate") else []

    def _hosts(self) -> list[str]:
        given = self.asked.options.get("hosts", ())
        return [host for text in given for host in text.replace(",", " ").split()]

    def _ranks(self, name: str) -> list[str]:
        """How ranks are started."""
        asked = self.asked
        if asked.one("exec-type") not in (None, "mpi"):
            raise UsageError("Containers are not started", where="--exec-type", fix="Use mpi.")
        number = asked.number(name) or asked.number("num-processes")
        hosts = self._hosts()
        words = ["--ranks", str(number)] if number else []
        if hosts and not {host.partition(":")[0] for host in hosts} <= _LOCAL:
            words += ["--hosts", ",".join(hosts)]
        launcher = asked.one("mpi-bin")
        words += ["--launcher", launcher] if launcher else []
        for option in ("oversubscribe", "allow-run-as-root"):
            if asked.has(option):
                words += self._launcher_option(option, launcher)
        for text in asked.options.get("mpi-params", ()):
            words += [f"--launcher-arg={part}" for part in shlex.split(text)]
        return words

    def _launcher_option(self, option: str, launcher: str | None) -> list[str]:
        if launcher == "mpirun":
            return [f"--launcher-arg=--{option}"]
        self.remarks.append(f"--{option} is Open MPI's: it is passed on with --mpi-bin mpirun alone")
        return []

    def _remark_on_places(self) -> None:
        asked = self.asked
        if asked.has("client-host-memory-in-gb") or asked.has("num-client-hosts"):
            self.remarks.append("memory and hosts are measured by the ranks themselves, not taken as stated")
        if asked.has("loops"):
            self.remarks.append("--loops: one run is made; penstock submission run makes all of a result")
        if asked.mode in ("closed", "open") and not self.is_handed_in:
            lacks = "--systemname names no system" if not self.system else f"{self.results} is not claimed"
            self.remarks.append(
                f"the run is not handed in, because {lacks} (penstock submission init ORGANISATION FOLDER)"
            )
            if asked.benchmark == "checkpointing":
                self.remarks.append(f"what {asked.mode} asks of checkpoints is looked at when it is")


def _other(asked: Asked, around: Surroundings) -> list[str]:
    """Commands without a benchmark."""
    results = asked.one("results-dir") or around.results or _DEFAULT_ROOT
    rest = list(asked.rest)
    if asked.command in ("history", "runs"):
        return _of_history(asked, rest, results)
    if asked.command == "init" and not rest:
        raise UsageError("No organisation is named", fix="Write: init ORGANISATION FOLDER")
    if asked.command == "lockfile":
        raise UsageError(
            "Lock files are not made here",
            where="lockfile",
            fix="Each run.json holds the versions of all packages that can move a figure.",
        )
    report = ["submission", "report", results, "--write"]
    return {
        "init": ["submission", "init", *rest[:1], rest[1] if len(rest) > 1 else results],
        "validate": ["submission", "check", rest[0] if rest else results],
        "reports": report if around.is_claimed(results) else ["results", "ls", results],
        "rules-coverage": ["submission", "rules"],
        "version": ["--version"],
    }[asked.command]


def _of_history(asked: Asked, rest: list[str], results: str) -> list[str]:
    verb = rest.pop(0) if rest else "show"
    known = {"show": "show", "list": "ls", "rerun": "rerun", "rm": "rm"}
    if verb not in known:
        raise UsageError(
            f"{verb!r} is not understood", where=asked.command, fix=f"Choose of: {', '.join(known)}."
        )
    named = rest or list(asked.options.get("id", ()))
    if verb == "list" or (verb == "show" and not named):
        return ["results", "ls", results]
    return ["results", known[verb], *named, "--results", results]
