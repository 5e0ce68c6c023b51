"""`penstock-mlpstorage`: the command lines of mlpstorage, v2 and v3, done by penstock's own verbs.

Place in the flow: words -> one command line of penstock, which is shown and then run. Invariant: what means
nothing here is said once, and what is not measured here is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock import __version__
from penstock.cli import app
from penstock.cli.mlpstorage_plan import Plan, Surroundings, plan
from penstock.cli.mlpstorage_words import known_option, parse
from penstock.environment import process_environment
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.cli.mlpstorage_words import Asked
    from penstock.environment import Environment

HELP: Final = f"""\
Usage: penstock-mlpstorage closed|open|whatif training MODEL datasize|datagen|run|configview [file|object] ...
       penstock-mlpstorage closed|open|whatif checkpointing MODEL datasize|run|configview [file|object] ...
       penstock-mlpstorage training|checkpointing COMMAND --model MODEL [--closed|--open] ...
       penstock-mlpstorage init ORG [FOLDER] | reports reportgen | history show|rerun ID | runs list|show|rm
       penstock-mlpstorage validate FOLDER | rules-coverage | version

Run mlpstorage's command lines, of v3 and of v2, with penstock: each becomes one command of penstock, which is
shown before it runs. Vector search and the key-value cache benchmark are not measured here.

  --data-dir, --checkpoint-folder FOLDER    where data go
  --results-dir FOLDER --systemname NAME    where results go; a run is handed in if `init` has claimed the
                                            folder. MLPSTORAGE_RESULTS_DIR, _SYSTEMNAME, _DATA_DIR and
                                            _CHECKPOINT_FOLDER stand for options that are left out
  --params KEY=VALUE ...                    values of the workload
  --hosts A:4,B:4 --mpi-bin NAME --mpi-params="..."    how ranks are started
  --config-file FILE                        options from a YAML file; those of the command line overrule it
  --dry-run                                 show the command, and do nothing
  --debug                                   show a traceback with every error

Example:
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
    planned: list[Plan] = []
    code = app.at_the_edge(lambda: planned.extend(_understood(words)), debug=debug)
    if not planned:
        return code
    return _carried_out([*planned[0].words, *(["--debug"] if debug else [])])


def _carried_out(words: list[str]) -> int:
    """Carry the planned command out as if it had been given: runs record it, and are repeated by it."""
    given = sys.argv
    sys.argv = ["penstock", *words]
    try:
        return app.main(words)
    finally:
        sys.argv = given


def _understood(words: Sequence[str]) -> list[Plan]:
    """The command to run, shown; none for a dry run."""
    environment = process_environment()
    asked = _with_file(words)
    planned = plan(asked, _surroundings(environment))
    for remark in planned.remarks:
        print(remark, file=sys.stderr)
    if asked.has("dry-run") or asked.has("what-if"):
        print(planned.text)
        return []
    print(f"= {planned.text}", file=sys.stderr)
    return [planned]


def _with_file(words: Sequence[str]) -> Asked:
    """The words, with the options of their `--config-file` beneath them."""
    asked = parse(words)
    name = asked.one("config-file")
    return asked if name is None else parse(words, defaults=_options_of(Path(name)))


def _options_of(path: Path) -> Mapping[str, tuple[str, ...]]:
    from penstock.workload.loading import read_text
    from penstock.workload.strict_yaml import parse_yaml

    options: dict[str, tuple[str, ...]] = {}
    for key, value in parse_yaml(read_text(path), source=str(path)).items():
        known = known_option(f"--{str(key).replace('_', '-')}")
        if isinstance(value, Mapping):
            raise UsageError(f"{key} has values of its own", where=str(path), fix="Write a value or a list.")
        if value is not False:
            given = value if isinstance(value, list) else [] if value is True else [value]
            options[known.name] = tuple(map(str, given))
    return options


def _surroundings(environment: Environment) -> Surroundings:
    from penstock.submission.tree_layout import SENTINEL

    return Surroundings(
        results=environment.get("MLPSTORAGE_RESULTS_DIR"),
        system=environment.get("MLPSTORAGE_SYSTEMNAME"),
        data=environment.get("MLPSTORAGE_DATA_DIR"),
        checkpoints=environment.get("MLPSTORAGE_CHECKPOINT_FOLDER"),
        bucket=environment.get("BUCKET"),
        is_claimed=lambda folder: (Path(folder).expanduser() / SENTINEL).is_file(),
    )
