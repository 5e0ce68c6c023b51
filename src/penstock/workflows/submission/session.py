"""What all leaves of one command share, and how a run's outcome becomes a leaf.

Place in the flow: the command line makes a `Session`, the makers of leaves use it. Collective where it takes
a `comm`; files are rank 0's business. Invariant: nothing here times anything: runs do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __file__ as package_file
from penstock import __version__
from penstock.results.provenance import git_state
from penstock.submission.authoring.result_dir import reserve_address
from penstock.submission.authoring.write_result_dir import ProgramImage
from penstock.submission.code_image import UNKNOWN, Program, capture

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm
    from penstock.environment import Environment
    from penstock.submission.authoring.ownership import OwnedTree
    from penstock.submission.authoring.result_dir import ResultDirAddress, Series
    from penstock.submission.tree_layout import SubmissionPhase

Clock = Callable[[], datetime]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a command prints of one run: the leaf keeps it as its logs."""

    stdout: str
    stderr: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One command's view of the series it adds leaves to.

    `changed` is what was asked of the workload by dotted key, places included; `command` is the command line.
    """

    series: Series
    image: ProgramImage
    place: str
    changed: Mapping[str, Any]
    command: Sequence[str]
    environment: Environment = field(default_factory=dict)
    clock: Clock = lambda: datetime.now(UTC)

    def reserve(self, phase: SubmissionPhase, comm: Comm) -> ResultDirAddress:
        """The address of the next leaf, the same on all ranks. Collective."""
        address = reserve_address(self.series, phase, now=self.clock()) if comm.rank == 0 else None
        found = comm.broadcast(address, awaiting="the place of the next leaf")
        assert found is not None
        return found


def installed_program() -> Program:
    """The package that runs, as it is installed here."""
    folder = Path(package_file).parent
    state = git_state(folder)
    return Program(folder=folder, version=__version__, commit=state.commit if state else UNKNOWN)


def capture_image(
    claim: OwnedTree, *, comm: Comm, clock: Clock, program: Program | None = None
) -> ProgramImage:
    """The program's image in the tree's pool, the same on all ranks. Collective."""
    image = None
    if comm.rank == 0:
        captured = program or installed_program()
        image = ProgramImage(program=captured, digest=capture(captured, claim.root, now=clock()))
    found = comm.broadcast(image, awaiting="the image of the program")
    assert found is not None
    return found
