"""`penstock-mlpstorage`: the command lines of mlpstorage, v2 and v3, translated to penstock's own commands.

Place in the flow: arguments -> one command line of penstock, which is printed and then run. Invariant: an
option without an effect is reported once, and a benchmark that does not exist here is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock import __version__
from penstock.cli import app
from penstock.cli.mlpstorage_arguments import known_option, parse
from penstock.cli.mlpstorage_translation import Defaults, TranslatedCommand, translate
from penstock.environment import Environment, process_environment
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.cli.mlpstorage_arguments import MlpstorageCommand

HELP: Final = f"""\
Usage: penstock-mlpstorage closed|open|whatif training MODEL datasize|datagen|run|configview [file|object] ...
       penstock-mlpstorage closed|open|whatif checkpointing MODEL datasize|run|configview [file|object] ...
       penstock-mlpstorage training|checkpointing COMMAND --model MODEL [--closed|--open] ...
       penstock-mlpstorage init ORG [FOLDER] | reports reportgen | history show|rerun ID | runs list|show|rm
       penstock-mlpstorage validate FOLDER | rules-coverage | version

Run mlpstorage's command lines, of v3 and of v2, with penstock: each is translated to one penstock command,
which is printed before it runs. The vector search and key-value cache benchmarks are not supported.

Options:
  --data-dir, --checkpoint-folder FOLDER    Directory for the data set, or for checkpoints.
  --results-dir FOLDER --systemname NAME    Directory for results, and the system under test. The run is added
                                            to the submission if `init` has made the directory its tree.
                                            Defaults: MLPSTORAGE_RESULTS_DIR, MLPSTORAGE_SYSTEMNAME,
                                            MLPSTORAGE_DATA_DIR and MLPSTORAGE_CHECKPOINT_FOLDER.
  --params KEY=VALUE ...                    Change values of the workload.
  --hosts A:4,B:4 --mpi-bin NAME --mpi-params="..."    Choose hosts, launcher and its arguments.
  --config-file FILE                        Read options from a YAML file; the command line takes precedence.
  --dry-run                                 Print the command, and run nothing.
  --debug                                   Show a traceback with every error.

Examples:
  penstock-mlpstorage closed training unet3d run file --accelerator-type b200 --num-accelerators 8 \\
    --data-dir /mnt/data --results-dir ~/results --systemname fast --params dataset.num_files_train=28000

{app.EXIT_CODES}
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code."""
    words, debug = app.take_debug(sys.argv[1:] if arguments is None else arguments)
    if not words or {"-h", "--help"} & set(words):
        print(HELP, end="")
        return 0 if words else 2
    if words == ["--version"]:
        print(f"penstock-mlpstorage {__version__}")
        return 0
    commands: list[TranslatedCommand] = []
    code = app.run_at_edge(lambda: commands.extend(_translate(words)), debug=debug)
    if not commands:
        return code
    # Run as if the user had typed it: runs record this command, and are repeated by it.
    return app.main([*commands[0].words, *(["--debug"] if debug else [])])


def _translate(words: Sequence[str]) -> list[TranslatedCommand]:
    """Print the command to run, and return it; an empty list for a dry run."""
    requested = _with_config_file(words)
    command = translate(requested, _read_defaults(process_environment()))
    for remark in command.remarks:
        print(remark, file=sys.stderr)
    if requested.has("dry-run") or requested.has("what-if"):
        print(command.text)
        return []
    print(f"= {command.text}", file=sys.stderr)
    return [command]


def _with_config_file(words: Sequence[str]) -> MlpstorageCommand:
    """The command, with the options of its `--config-file` as defaults."""
    command = parse(words)
    name = command.value("config-file")
    return command if name is None else parse(words, defaults=_read_config_file(Path(name)))


def _read_config_file(path: Path) -> Mapping[str, tuple[str, ...]]:
    from penstock.workload.loading import read_text
    from penstock.workload.strict_yaml import parse_yaml

    options: dict[str, tuple[str, ...]] = {}
    for key, value in parse_yaml(read_text(path), source=str(path)).items():
        option = known_option(f"--{str(key).replace('_', '-')}")
        if isinstance(value, Mapping):
            raise UsageError(f"{key} is a mapping", where=str(path), fix="Write a value or a list.")
        if value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            options[option.name] = tuple(map(str, values))
    return options


def _read_defaults(environment: Environment) -> Defaults:
    from penstock.submission.tree_layout import SENTINEL

    return Defaults(
        results=environment.get("MLPSTORAGE_RESULTS_DIR"),
        system=environment.get("MLPSTORAGE_SYSTEMNAME"),
        data=environment.get("MLPSTORAGE_DATA_DIR"),
        checkpoints=environment.get("MLPSTORAGE_CHECKPOINT_FOLDER"),
        bucket=environment.get("BUCKET"),
        is_submission_tree=lambda folder: (Path(folder).expanduser() / SENTINEL).is_file(),
    )
