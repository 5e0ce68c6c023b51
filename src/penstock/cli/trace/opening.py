"""What the verbs of `penstock trace` share: files as arguments, losses said first, `--strict`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from penstock.cli.terminal import Terminal
    from penstock.trace.event_schema import FileAccount
    from penstock.trace.trace_set import TraceSet

Files = Annotated[
    list[str], typer.Argument(metavar="FILES...", help="Trace files, folders, globs, tables of `trace load`.")
]
Where = Annotated[
    str, typer.Option("--where", metavar="SQL", help="Only these events: \"path LIKE '%ckpt%'\".")
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail if anything of a trace was lost or guessed.")]
Dask = Annotated[
    str,
    typer.Option("--dask", metavar="WHERE", help="Let Dask's workers read: local, or a scheduler's address."),
]
RankPattern = Annotated[
    str | None,
    typer.Option("--rank-pattern", metavar="REGEX", help="Its first group is the rank in a file's name."),
]


@contextmanager
def opened(
    files: Sequence[str],
    terminal: Terminal,
    *,
    where: str = "",
    strict: bool = False,
    rank_pattern: str | None = None,
    dask: str = "",
) -> Iterator[TraceSet]:
    """Open traces for a verb: progress while they are read, then what was lost of them, then the traces."""
    from penstock.trace.reading.event_filter import EventFilter
    from penstock.trace.reading.trace_file import RANK_PATTERN
    from penstock.trace.trace_set import open_trace_set

    with ExitStack() as resources:
        with terminal.progress() as progress:
            traces = resources.enter_context(
                open_trace_set(
                    {"": files},
                    progress=progress,
                    event_filter=EventFilter(where=where),
                    rank_pattern=rank_pattern or RANK_PATTERN,
                    dask=dask,
                )
            )
        tell_losses(traces.accounts, terminal, strict=strict)
        yield traces


def tell_losses(accounts: Sequence[FileAccount], terminal: Terminal, *, strict: bool) -> None:
    """Say on stderr what was lost; with `strict` it is an error."""
    from penstock.trace.event_schema import refuse_damaged

    for account in accounts:
        for line in account.losses():
            terminal.note(line)
    if strict:
        refuse_damaged(accounts)
