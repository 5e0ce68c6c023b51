"""`penstock checkpoint verify`: every checksum of a checkpoint, at the speed of the device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.checkpoint.verify import Verification

DAMAGED = 1
NOT_CHECKED = 3


def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint's folder, .pt or .safetensors.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Read all of the checkpoint at PATH and compare every checksum that it has.

    Ours have one of each byte. Stock torch checkpoints are held to the CRC-32 in their archives, which torch
    itself never looks at. Exits with 1 and the list of damage, or with 3 where there are no checksums at all.

    Examples:

      penstock checkpoint verify /pfs/run/step-100

      penstock checkpoint verify s3://bucket/run/step-100 --json
    """
    from dataclasses import asdict

    from penstock.checkpoint import verify as verification

    terminal = Terminal(as_json=as_json)
    begun_s = time.monotonic()
    with terminal.progress() as progress:
        found = verification.verify(path, progress)
    elapsed_s = time.monotonic() - begun_s
    for note in found.notes:
        terminal.note(note)
    document = {**asdict(found), "is_whole": found.is_whole, "elapsed_s": elapsed_s}
    terminal.result(document, lambda console: _draw(console, found, elapsed_s))
    if not found.is_whole:
        raise typer.Exit(DAMAGED)
    if not found.is_checked:
        raise typer.Exit(NOT_CHECKED)


def _draw(console: Console, found: Verification, elapsed_s: float) -> None:
    from penstock.units import format_bytes, format_rate, format_seconds

    for damage in found.damage:
        console.print(f"damaged: {damage}")
    rate = format_rate(found.checked_bytes / elapsed_s) if elapsed_s > 0 else "-"
    size = f"{format_bytes(found.checked_bytes)} of {format_bytes(found.size_bytes)} checked"
    verdict = "whole" if found.is_whole and found.is_checked else "not checked"
    if found.damage:
        verdict = f"damaged in {len(found.damage)} places"
    console.print(
        f"{found.uri}: {verdict}; {found.num_items} items in {found.num_files} files, {size} "
        f"in {format_seconds(elapsed_s)} ({rate})"
    )
