"""`penstock-mlpstorage`: the command lines of mlpstorage, v2 and v3, translated to Penstock's own commands.

    words -> `MlpstorageCommand` -> words of penstock, which are printed and then run

Invariant: no request is dropped without a remark or an error; an unknown word causes an error that suggests
the nearest known word.
"""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock import __version__
from penstock.cli import app
from penstock.did_you_mean import did_you_mean
from penstock.environment import Environment, process_environment
from penstock.errors import UsageError, printable
from penstock.submission.tree_layout import SENTINEL

_MODES: Final = ("closed", "open", "whatif")
_BENCHMARKS: Final = ("training", "checkpointing")
_UNSUPPORTED: Final = {
    "vectordb": "Run vector search with mlpstorage itself.",
    "kvcache": "Run the key-value cache benchmark with `penstock kvcache run mlperf-v3 --to URI`.",
}
_PHASES: Final = ("datasize", "datagen", "run", "configview")
_OTHER_COMMANDS: Final = (
    "init", "reports", "history", "runs", "validate", "rules-coverage", "lockfile", "version",
)  # fmt: skip
OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "results-dir": ("-rd",),
    "systemname": ("-sn", "--system-name"),
    "config-file": ("-c",),
    "data-dir": ("-dd",),
    "model": ("-m",),
    "accelerator-type": ("-at", "-g"),
    "num-accelerators": ("-na", "-n"),
    "max-accelerators": ("-ma",),
    "num-processes": ("-np",),
    "client-host-memory-in-gb": ("-cm",),
    "num-client-hosts": ("-nc",),
    "hosts": ("-s",),
    "exec-type": ("-et",),
    "params": ("-p", "--param"),
    "mpi-bin": (),
    "mpi-params": (),
    "oversubscribe": (),
    "allow-run-as-root": (),
    "checkpoint-folder": ("-cf",),
    "num-checkpoints-read": ("-ncr",),
    "num-checkpoints-write": ("-ncw",),
    "checkpoint-subset": (),
    "o-direct": (),
    "loops": (),
    "open": (),
    "closed": (),
    "dry-run": (),
    "what-if": (),
    "skip-fs-separation-gate": (),
    "id": ("-i",),
    "dlio-bin-path": ("-dp",),
    "allow-invalid-params": ("-aip",),
}
"""Options that have an effect here, with their other names."""
IGNORED: Final[Mapping[str, str]] = {
    "debug": "penstock prints what matters on stderr",
    "verbose": "penstock prints what matters on stderr",
    "quiet": "penstock prints what matters on stderr",
    "stream-log-level": "penstock prints what matters on stderr",
    "color": "colors follow the terminal",
    "mpi-btl": "ranks exchange no data through MPI's byte transports",
    "dlio-bin-path": "DLIO is not run",
    "allow-invalid-params": "an unknown parameter is always an error",
    "skip-validation": "every run is validated before it begins",
    "verify-lockfile": "run.json holds the versions of all packages",
    "skip-timeseries": "counters cost under half a percent",
    "timeseries-interval": "counters are read every second",
    "max-timeseries-samples": "counters are thinned out automatically",
    "cluster-collector-shared-staging": "nothing is staged on hosts",
    "limit": "all runs are listed",
}
"""Options that have no effect here, with the reason."""
FLAGS: Final = frozenset({
    "oversubscribe", "allow-run-as-root", "checkpoint-subset", "o-direct", "open", "closed", "dry-run",
    "what-if", "skip-fs-separation-gate", "debug", "verbose", "quiet", "allow-invalid-params",
    "skip-validation", "skip-timeseries",
})  # fmt: skip
"""Options without a value."""
_LISTS: Final = frozenset({"hosts", "params", "mpi-params"})
"""Options that take all words up to the next option."""
NAMES: Final[Mapping[str, str]] = {
    other: name for name in (*OPTIONS, *IGNORED) for other in (f"--{name}", *OPTIONS.get(name, ()))
}
"""The option for each spelling; any other spelling causes an error."""
_RESULTS: Final = "MLPSTORAGE_RESULTS_DIR"
_DEFAULT_ROOT: Final = "mlpstorage-results"
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpstorageCommand:
    """A parsed command line. `mode` is "" in v2's form without a division; `rest` has all other arguments."""

    mode: str = ""
    benchmark: str = ""
    command: str
    model: str = ""
    storage: str = ""
    rest: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Check whether an option was given."""
        return name in self.options

    def value(self, name: str) -> str | None:
        """Return the last value of an option, or None if it was not given."""
        return self.options[name][-1] if self.options.get(name) else None

    def number(self, name: str) -> int | None:
        """Return the value of an option as a whole number, or None if it was not given."""
        text = self.value(name)
        if text is not None and not text.isdecimal():
            raise UsageError(f"{text!r} is not a whole number", where=f"--{name}", fix="Write digits.")
        return None if text is None else int(text)


def parse(
    words: Sequence[str], *, defaults: Mapping[str, tuple[str, ...]] | None = None
) -> MlpstorageCommand:
    """Parse a command line. Its options take precedence over `defaults`, the options in a file."""
    unsupported = next((word for word in words[:2] if word in _UNSUPPORTED), None)
    if unsupported is not None:  # its options are not known here, so they are not parsed
        raise UsageError(
            "penstock-mlpstorage runs training and checkpointing alone",
            where=unsupported,
            fix=_UNSUPPORTED[unsupported],
        )
    positional, own_options = _split(words)
    options = {**(defaults or {}), **own_options}
    if not positional:
        raise UsageError("No command is given", fix="penstock-mlpstorage --help shows the forms.")
    first, *rest = positional
    if first in _OTHER_COMMANDS:
        return MlpstorageCommand(command=first, rest=tuple(rest), options=options)
    if first in _BENCHMARKS:  # v2's form: options name the division and the model
        modes = [mode for mode in ("closed", "open") if mode in options]
        if len(modes) > 1:
            raise UsageError(
                "--closed and --open are mutually exclusive", where=first, fix="Leave one of them out."
            )
        mode, benchmark, model = "".join(modes), first, options.get("model", ("",))[-1]
    elif first in _MODES:  # v3's form: the division, the benchmark, the model, the command, file or object
        mode, benchmark = first, _require_word(rest, _BENCHMARKS, "benchmark")
        rest = rest[1:]
        model = rest.pop(0) if rest and rest[0] not in _PHASES else ""
    else:
        raise _unknown(first, (*_MODES, *_BENCHMARKS, *_OTHER_COMMANDS))
    command = _require_word(rest, _PHASES, "command")
    storage = rest[1] if len(rest) > 1 and first in _MODES else ""
    if storage not in ("", "file", "object"):
        raise _unknown(storage, ("file", "object"))
    if more := rest[2 if storage else 1 :]:
        raise _unknown(more[0], ())
    return MlpstorageCommand(
        mode=mode, benchmark=benchmark, command=command, model=model, storage=storage, options=options
    )


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Split words into positional words, and options with all of their values."""
    positional: list[str] = []
    options: dict[str, tuple[str, ...]] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("-") or word == "-":
            positional.append(word)
            continue
        spelling, equals, value = word.partition("=")
        name, values = option_name(spelling), [value] if equals else []
        if not equals and name not in FLAGS:
            if not remaining or remaining[0].startswith("--"):
                raise UsageError(f"{spelling} needs a value", fix=f"Write {spelling} VALUE.")
            values.append(remaining.pop(0))
            while name in _LISTS and remaining and not remaining[0].startswith("-"):
                values.append(remaining.pop(0))
        options[name] = (*options.get(name, ()), *values)
    return positional, options


def option_name(spelling: str) -> str:
    """Return the name of an option. Raises `UsageError` that suggests the nearest name."""
    if spelling not in NAMES:
        raise _unknown(spelling, tuple(NAMES))
    return NAMES[spelling]


def _require_word(words: Sequence[str], allowed: tuple[str, ...], what: str) -> str:
    if not words:
        raise UsageError(f"No {what} is named", fix=f"Write one of: {', '.join(allowed)}.")
    if words[0] not in allowed:
        raise _unknown(words[0], allowed)
    return words[0]


def _unknown(word: str, allowed: tuple[str, ...]) -> UsageError:
    hint = did_you_mean(word, allowed) if allowed else ""
    return UsageError(
        f"{word!r} is not a known word", fix=f"{hint}penstock-mlpstorage --help shows the forms."
    )


def translate(
    command: MlpstorageCommand, environment: Environment, is_tree: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """Return the equivalent words for penstock, without its name, and remarks to print first.

    `is_tree` returns true if a folder is a submission tree.
    """
    remarks = [f"--{name} is ignored: {why}" for name, why in IGNORED.items() if command.has(name)]
    if command.benchmark:
        translator = _BenchmarkTranslator(command, environment, is_tree)
        words = translator.training() if command.benchmark == "training" else translator.checkpointing()
        remarks += translator.remarks
    else:
        words = _translate_other(command, environment, is_tree)
    return words, remarks


class _BenchmarkTranslator:
    """Translates one benchmark's command; `remarks` collects what Penstock does differently."""

    def __init__(
        self, command: MlpstorageCommand, environment: Environment, is_tree: Callable[[str], bool]
    ) -> None:
        if not command.model:
            raise UsageError("No model is named", fix="Write it after the benchmark, or --model NAME.")
        self.command = command
        self.environment = environment
        self.remarks: list[str] = []
        self.results = command.value("results-dir") or environment.get(_RESULTS) or "."
        self.settings = [word for text in command.options.get("params", ()) for word in ("--set", text)]
        self.skipped = ["--skip-gate", "apart"] if command.has("skip-fs-separation-gate") else []
        accelerator = command.value("accelerator-type")
        self.accelerator = ["--accelerator", accelerator] if accelerator else []
        texts = command.options.get("hosts", ())
        self.hosts = [host for text in texts for host in text.replace(",", " ").split()]
        self.division = [f"--{command.mode}"] if command.mode in ("closed", "open") else []
        system = command.value("systemname") or environment.get("MLPSTORAGE_SYSTEMNAME")
        self.submission: list[str] = []
        if self.division and system and is_tree(self.results):
            tree = ["--submission", self.results, "--system", system]
            self.submission = [*self.division, *tree, *self.skipped]
        if command.command in ("datasize", "configview"):
            return
        if command.has("client-host-memory-in-gb") or command.has("num-client-hosts"):
            self.remarks.append("memory and hosts are measured by the ranks; the stated values are ignored")
        if command.has("loops"):
            self.remarks.append(
                "--loops: one run is made; penstock submission run makes all runs of a result"
            )
        if self.division and not self.submission:
            reason = f"{self.results} is not a submission tree" if system else "--systemname is missing"
            self.remarks.append(f"the run is not submitted: {reason} (penstock submission init ORG DIR)")
            if command.benchmark == "checkpointing":
                self.remarks.append(
                    f"the {command.mode} division's rules on checkpoints are checked only when it is"
                )

    def training(self) -> list[str]:
        """Translate `training datasize`, `datagen`, `run` and `configview`."""
        command, phase = self.command, self.command.command
        workload = [command.model, *self.accelerator]
        if phase == "configview":
            return ["workloads", *workload, *self.settings]
        if phase == "datasize":
            number = command.number("max-accelerators") or command.number("num-accelerators")
            memory = command.number("client-host-memory-in-gb")
            if number is None or memory is None:
                raise UsageError(
                    "The size of a data set depends on accelerators and memory",
                    where="datasize",
                    fix="Give --max-accelerators N and --client-host-memory-in-gb GIB.",
                )
            hosts = command.number("num-client-hosts") or max(1, len(self.hosts))
            self.remarks.append("the size of the data set is added to the submission with the first run")
            return ["training", "size", *workload, *self.settings, "--accelerators", str(number),
                    "--hosts", str(hosts), "--host-memory", f"{memory}GiB"]  # fmt: skip
        folder = command.value("data-dir") or self.environment.get("MLPSTORAGE_DATA_DIR")
        if folder is None:
            raise UsageError("No location is given for the data set", fix="Give --data-dir FOLDER.")
        place = self._place(folder)
        data = ["--data", f"direct://{place}" if command.has("o-direct") and "://" not in place else place]
        ranks = self._ranks("num-processes" if phase == "datagen" else "num-accelerators")
        if self.submission:
            return ["submission", "run", "training", *workload, "--only", phase, *data,
                    *self.settings, *self.submission, *ranks]  # fmt: skip
        if phase == "datagen":
            return ["training", "generate", *workload, *data, *self.settings, *ranks]
        return ["training", "run", *workload, *data, *self.settings, "--results", self.results,
                *self.division, *self.skipped, *ranks]  # fmt: skip

    def checkpointing(self) -> list[str]:
        """Translate `checkpointing datasize`, `run` and `configview`."""
        command, model = self.command, self.command.model
        if command.command == "datagen":
            raise UsageError("Checkpoints need no data set", where="datagen", fix="Use run.")
        if command.command == "configview":
            return ["workloads", model, *self.settings]
        ranks = command.number("num-processes")
        if command.command == "datasize":
            return ["checkpoint", "size", model, *(["--ranks", str(ranks)] if ranks else [])]
        folder = command.value("checkpoint-folder") or self.environment.get("MLPSTORAGE_CHECKPOINT_FOLDER")
        if folder is None:
            raise UsageError(
                "No destination is given for the checkpoints", fix="Give --checkpoint-folder FOLDER."
            )
        words = ["checkpoint", "run", model, "--to", self._place(folder), *self.settings]
        for name, option in (("num-checkpoints-write", "--writes"), ("num-checkpoints-read", "--reads")):
            if command.number(name) is not None:
                words += [option, str(command.number(name))]
        words += ["--subset"] if command.has("checkpoint-subset") else []
        unsubmitted = ["--results", self.results, *self.skipped]
        words += [*self.accelerator, *self.submission] if self.submission else unsubmitted
        return [*words, *self._ranks("num-processes")]

    def _place(self, folder: str) -> str:
        """Return the model's own folder in `folder`, or in object storage, the model's own prefix."""
        below = f"{folder.rstrip('/')}/{self.command.model}"
        if self.command.storage != "object" or "://" in folder:
            return below
        if not (bucket := self.environment.get("BUCKET")):
            raise UsageError("No bucket is given", where="object", fix="Export BUCKET=name.")
        return f"s3://{bucket}/{below.lstrip('/')}"

    def _ranks(self, name: str) -> list[str]:
        """Return the options that start several ranks."""
        command = self.command
        if command.value("exec-type") not in (None, "mpi"):
            raise UsageError("Containers are not supported", where="--exec-type", fix="Use mpi.")
        number = command.number(name) or command.number("num-processes")
        hosts = self.hosts
        words = ["--ranks", str(number)] if number else []
        if hosts and not {host.partition(":")[0] for host in hosts} <= _LOCAL:
            words += ["--hosts", ",".join(hosts)]
        launcher = command.value("mpi-bin")
        words += ["--launcher", launcher] if launcher else []
        for option in filter(command.has, ("oversubscribe", "allow-run-as-root")):
            if launcher == "mpirun":
                words.append(f"--launcher-arg=--{option}")
            else:
                self.remarks.append(
                    f"--{option} is an option of Open MPI: it is passed on only with --mpi-bin mpirun"
                )
        for text in command.options.get("mpi-params", ()):
            words += [f"--launcher-arg={part}" for part in shlex.split(text)]
        return words


def _translate_other(
    command: MlpstorageCommand, environment: Environment, is_tree: Callable[[str], bool]
) -> list[str]:
    """Translate a command that belongs to no benchmark."""
    results = command.value("results-dir") or environment.get(_RESULTS) or _DEFAULT_ROOT
    rest = list(command.rest)
    if command.command in ("history", "runs"):
        verb = rest.pop(0) if rest else "show"
        known = {"show": "show", "list": "ls", "rm": "rm"}
        if verb not in known:
            raise UsageError(
                f"{verb!r} is not a known command",
                where=command.command,
                fix=f"Choose from: {', '.join(known)}.",
            )
        named = rest or list(command.options.get("id", ()))
        if verb == "list" or (verb == "show" and not named):
            return ["results", "ls", results]
        confirmed = ["--yes"] if verb == "rm" else []
        return ["results", known[verb], *named, *confirmed, "--results", results]
    if command.command == "init" and not rest:
        raise UsageError("No organization is named", fix="Write: init ORG [FOLDER]")
    if command.command == "lockfile":
        raise UsageError(
            "Lock files are not supported",
            where="lockfile",
            fix="Each run.json holds the versions of all packages that affect results.",
        )
    report = ["submission", "report", results, "--write"]
    return {
        "init": ["submission", "init", *rest[:1], rest[1] if len(rest) > 1 else results],
        "validate": ["submission", "check", rest[0] if rest else results],
        "reports": report if is_tree(results) else ["results", "ls", results],
        "rules-coverage": ["submission", "rules"],
        "version": ["--version"],
    }[command.command]


HELP: Final = f"""\
Usage: penstock-mlpstorage closed|open|whatif training MODEL datasize|datagen|run|configview [file|object] ...
       penstock-mlpstorage closed|open|whatif checkpointing MODEL datasize|run|configview [file|object] ...
       penstock-mlpstorage training|checkpointing COMMAND --model MODEL [--closed|--open] ...
       penstock-mlpstorage init ORG [FOLDER] | reports reportgen | history show ID | runs list|show|rm
       penstock-mlpstorage validate FOLDER | rules-coverage | version

Run command lines of mlpstorage v2 and v3 with penstock: each is translated to one penstock command, which is
printed before it runs. The vector search and key-value cache benchmarks are not supported.

Options:
  --data-dir, --checkpoint-folder FOLDER    Directory for the data set, or for checkpoints.
  --results-dir FOLDER --systemname NAME    Directory for results; name of the system. The run is added
                                            to the submission if `init` made the directory a submission tree.
                                            Defaults in the environment: MLPSTORAGE_RESULTS_DIR,
                                            MLPSTORAGE_SYSTEMNAME, MLPSTORAGE_DATA_DIR and
                                            MLPSTORAGE_CHECKPOINT_FOLDER.
  --params KEY=VALUE ...                    Override settings of the workload.
  --hosts A:4,B:4 --mpi-bin NAME --mpi-params="..."    Choose hosts, launcher, and the launcher's arguments.
  --config-file FILE                        Read options from a YAML file; the command line takes precedence.
  --dry-run                                 Print the command without running it.
  --debug                                   Show a traceback with every error.

Examples:
  penstock-mlpstorage closed training unet3d run file --accelerator-type b200 --num-accelerators 8 \\
    --data-dir /mnt/data --results-dir ~/results --systemname fast --params dataset.num_files_train=28000

{app.EXIT_CODES}
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line (default: the process's own), and return its exit code."""
    words, debug = app.take_debug(arguments)
    translated: list[str] = []
    code = app.run_at_edge(lambda: translated.extend(_translate(words)), debug=debug)
    if not translated:
        return code
    # Run it as if the user had typed it, because a run records this command and can be repeated with it.
    return app.main([*translated, *(["--debug"] if debug else [])])


def _translate(words: Sequence[str]) -> list[str]:
    """Print the command to run, and return its words; none for a dry run, help or the version."""
    if not words or {"-h", "--help"} & set(words):
        print(HELP, end="")
        sys.exit(0 if words else 2)
    if words == ["--version"]:
        print(f"penstock-mlpstorage {__version__}")
        return []
    requested = parse(words)
    if (name := requested.value("config-file")) is not None:
        requested = parse(words, defaults=_read_config_file(Path(name)))
    translated, remarks = translate(
        requested,
        process_environment(),
        lambda folder: (Path(folder).expanduser() / SENTINEL).is_file(),
    )
    text = shlex.join(("penstock", *translated))
    for remark in remarks:
        print(printable(remark), file=sys.stderr)
    if requested.has("dry-run") or requested.has("what-if"):
        print(text)
        return []
    print(f"= {text}", file=sys.stderr)
    return translated


def _read_config_file(path: Path) -> Mapping[str, tuple[str, ...]]:
    from penstock.workload.load_workload import read_text
    from penstock.workload.strict_yaml import parse_yaml

    options: dict[str, tuple[str, ...]] = {}
    for key, value in parse_yaml(read_text(path), source=str(path)).items():
        name = option_name(f"--{str(key).replace('_', '-')}")
        if isinstance(value, Mapping):
            raise UsageError(f"{key} is a mapping", where=str(path), fix="Write a value or a list.")
        if value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            options[name] = tuple(map(str, values))
    return options
