"""Valid trees of which one file is hostile: it waits, never ends, explodes, or leads elsewhere.

Place in the flow: a valid tree on disk -> one change -> the file that findings must name. A link leads to a
folder that its own tree does not have; nothing outside of `tmp_path` is written to.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import chdir, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.submission.numbered_tree import RESULT, valid_submission
from tests.support.submission.timed_tree import valid_training

GIGABYTES: Final = 3 << 30
SUMMARY: Final = f"closed/acme/{RESULT}/run3/summary.json"
CONFIG: Final = f"closed/acme/{RESULT}/run3/configs/config.yaml"
JSON_SYSTEM: Final = "closed/acme/systems/fast.json"
SYSTEM: Final = "closed/acme/systems/fast.yaml"
RUN: Final = "closed/acme/results/fast/training/unet3d/run/20260701_104000"
DESCRIBED: Final = "cannot be understood"
READ: Final = "cannot be read"


@dataclass(frozen=True, kw_only=True)
class HostileTree:
    """A change of a tree of v1.0, or of v3.0 if `file` is in one, and what is said of `file` then."""

    name: str
    file: str
    change: Callable[[Path], object]
    says: str

    def write(self, root: Path) -> Path:
        """Write the tree below `root`."""
        is_numbered = RESULT in self.file or self.file == JSON_SYSTEM
        tree = (valid_submission() if is_numbered else valid_training(num_runs=3)).write(root)
        self.change(self.path(tree))
        return tree

    def path(self, tree: Path) -> Path:
        """The hostile file."""
        (found,) = tree.glob(self.file) if "*" in self.file else [tree / self.file]
        return found


def _take_out(path: Path) -> Path:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def _pipe(path: Path) -> None:
    os.mkfifo(_take_out(path))


def _socket(path: Path) -> None:
    _take_out(path)
    # The address of a socket is short.
    with chdir(path.parent), closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind(path.name)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: _take_out(path).symlink_to(target)


def _link_to_copy(path: Path) -> None:
    """Move a folder out of the tree, and link to it."""
    outside = path.parents[len(Path(RUN).parts) + 1] / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding="utf-8")


def _inflate(path: Path) -> None:
    """Make a file of gigabytes that take no space."""
    path.touch()
    os.truncate(path, GIGABYTES)


def _remove_separation(path: Path) -> None:
    (path.parent / "fs_separation.json").unlink()


def _pipe_for_log(path: Path) -> None:
    _remove_separation(path)
    _pipe(path)


def _billions(merge: str) -> str:
    """Each line has the one before nine times."""
    lines = ["a: &a {k: 1, l: 2}" if merge else "a: &a [x, x, x, x, x, x, x, x, x]"]
    for before, here in zip("abcdefgh", "bcdefghi", strict=True):
        nine = ",".join([f"*{before}"] * 9)
        lines.append(f"{here}: &{here} {{<<: [{nine}]}}" if merge else f"{here}: &{here} [{nine}]")
    return "\n".join(lines)


def _chain() -> str:
    return "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}]\n" for n in range(3000))


def _record_of_a_quadrillion(path: Path) -> None:
    record = json.loads(path.read_text())
    record["workload"]["dataset"]["num_files_train"] = 10**15
    path.write_text(json.dumps(record))


def _of(name: str, file: str, change: Callable[[Path], object], says: str) -> HostileTree:
    return HostileTree(name=name, file=file, change=change, says=says)


LOG: Final = f"{RUN}/training_run.stdout.log"
HOSTILE: Final[tuple[HostileTree, ...]] = (
    _of("named pipe as summary", SUMMARY, _pipe, f"{READ}: this is a named pipe"),
    _of("named pipe as log", LOG, _pipe_for_log, f"{READ}: this is a named pipe"),
    _of("named pipe as pointer", f"{RUN}/.mlps-code-image", _pipe, f"{READ}: this is a named pipe"),
    _of("named pipe in an image", "code-images/code-*/main.py", _pipe, f"{READ}: this is a named pipe"),
    _of("socket as description", SYSTEM, _socket, f"{READ}: this is a socket"),
    _of("link to a device", SUMMARY, _link("/dev/zero"), f"{READ}: this is a device"),
    _of("link to another file", SUMMARY, _link("/etc/hostname"), f"{READ}: a link leads out of the tree"),
    _of("link to itself", SUMMARY, _link("summary.json"), f"{READ}: Too many levels of symbolic links"),
    _of("run elsewhere", RUN, _link_to_copy, "cannot be listed: a link leads out of the tree"),
    _of("folder as summary", SUMMARY, lambda path: _take_out(path).mkdir(), f"{READ}: Is a directory"),
    _of("bomb of lists", SYSTEM, _text(_billions("")), "its aliases stand for more than 100,000 values"),
    _of("bomb as configuration", CONFIG, _text(_billions("")), "its aliases stand for more than 100,000"),
    _of("bomb of merged keys", SYSTEM, _text(_billions("<<")), "its aliases stand for more than 100,000"),
    _of("anchor in itself", SYSTEM, _text("a: &a [*a]\n"), "the alias *a stands for what it lies in"),
    _of("anchor of a mapping in itself", SYSTEM, _text("&a\nb: *a\n"), "the alias *a stands for what it"),
    _of("chain of aliases", SYSTEM, _text(_chain()), "nested deeper than 100 levels"),
    _of("brackets", SYSTEM, _text("[" * 200_000), "nested deeper than 100 levels"),
    _of("dashes", SYSTEM, _text("- " * 50_000 + "a"), "nested deeper than 100 levels"),
    _of("number in base 60", SYSTEM, _text("a: 1" + ":1" * 450_000), "has a number of 900,001 digits"),
    _of("Boolean that is none", SYSTEM, _text("a: !!bool x"), "line 1: 'x' is not a valid bool"),
    _of("thousands of keys", SYSTEM, _text("".join(f"solutio{n}: v\n" for n in range(60_000))), "no field"),
    _of("gigabytes of description", SYSTEM, _inflate, f"{READ}: it has more than the 1,048,576 bytes"),
    _of("gigabytes of summary", SUMMARY, _inflate, f"{READ}: it has more than the 16,777,216 bytes"),
    _of("gigabytes of code", "code-images/code-*/main.py", _inflate, f"{READ}: it has more than the"),
    _of("millions of lists", SUMMARY, _text("[" + "[]," * 5_000_000 + "1]"), "more than 160 MiB"),
    _of("braces", SUMMARY, _text('{"a":' * 900 + "1" + "}" * 900), "nested deeper than 100 levels"),
    _of("brackets as system", JSON_SYSTEM, _text("[" * 900 + "]" * 900), "nested deeper than 100 levels"),
    _of("quotes without end", JSON_SYSTEM, _text('"' + '\\"' * 400_000), "Unterminated string"),
    _of("a quadrillion files", f"{RUN}/run.json", _record_of_a_quadrillion, "whose order is verified"),
)
