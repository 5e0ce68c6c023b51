"""`penstock kvcache inspect`: what a store of cache entries holds, and what is wrong with it."""

from typing import Any

from penstock.cli.option_groups import STORAGE
from penstock.cli.options import argument, flag, option, verb
from penstock.cli.parsers import TEXT, URI, whole
from penstock.cli.terminal import Terminal, TextTable, View, format_number
from penstock.environment import process_environment
from penstock.units import format_bytes, format_seconds

DAMAGED = 1


@verb
def inspect(
    terminal: Terminal,
    *,
    store: str = argument(
        "STORE", URI, "Entries of vLLM, LMCache or Penstock: a directory or s3://bucket/prefix."
    ),
    storage: tuple[tuple[str, str], ...] = STORAGE,
    model: str | None = option(
        "--model",
        TEXT,
        "Assume the tokens of this model: one of `penstock kvcache models`, or a config.json.",
    ),
    verifies: bool = flag(
        "--verify", "Read all contents: checksums where there are some, else pages of zeros."
    ),
    streams: int = option("--streams", whole(1), "Read this many entries at a time.", default="8"),
) -> int:
    """Show what a STORE of cache entries holds: engines, models, tokens, and damaged or unfinished entries.

    Reads the file tiers of vLLM (offloading to a file system) and LMCache (disk, fs, and its server's), and
    Penstock's own.
    Nothing is changed. Exits with 1 if an entry is damaged.

    Examples:

      penstock kvcache inspect /mnt/kv

      penstock kvcache inspect /mnt/lmcache --model llama3.1-8b --verify --json
    """
    from penstock.kvcache.inspect_store import inspect_store
    from penstock.kvcache.models import find_model
    from penstock.storage import open_storage

    opened = open_storage(store, process_environment(), options=dict(storage))
    with terminal.progress() as progress:
        document = inspect_store(
            opened,
            progress,
            model=None if model is None else find_model(model),
            verifies=verifies,
            streams=streams,
        )
    terminal.result(document, view_store(document))
    return DAMAGED if document["damaged"] else 0


def view_store(document: dict[str, Any]) -> View:
    """A store for people."""
    yield (
        f"{document['target']}: {document['entries']:,} entries, {format_bytes(document['bytes'])}, "
        f"{document['damaged']:,} damaged"
        + ("" if document["verified"] else " by their names and sizes (--verify reads their contents)")
    )
    for series in document["series"]:
        yield from _view_series(series)
    for name, meaning in (("unfinished", "begun and not finished"), ("unknown", "of no layout known here")):
        if (found := document[name])["objects"]:
            yield (
                f"{found['objects']:,} objects {meaning}, {format_bytes(found['bytes'])}, the oldest "
                f"{format_seconds(found['oldest_age_s'])} old: {', '.join(found['examples'])}"
            )
    if document["wrong"]:
        yield TextTable("Damaged", document["wrong"], is_wide=True)


def _view_series(series: dict[str, Any]) -> View:
    tokens = series["tokens_per_entry"]
    per_token = format_number(series["bytes_per_token"], ",.0f")
    like = f" (as {', '.join(series['like_models'])})" if series["like_models"] else ""
    rows = [
        {"": "model", "value": series["model"] or "not stated"},
        {"": "entries", "value": f"{series['entries']:,}, {format_bytes(series['bytes'])}"},
        {"": "whole", "value": f"{series['whole']:,}, {series['partial']:,} of them shorter than others"},
        {"": "ranks", "value": f"{series['ranks']:,}"},
        {
            "": "blocks",
            "value": f"{series['blocks']:,}, {series['usable_blocks']:,} of them whole on all ranks",
        },
        {
            "": "tokens",
            "value": "not known" if tokens is None else f"{tokens:,} an entry, {series['tokens']:,} in all",
        },
        {"": "bytes a token", "value": f"{per_token}{like}"},
    ]
    if series["config_problem"]:
        rows.append({"": "configuration", "value": series["config_problem"]})
    misses = {name: count for name, count in series["misses"].items() if count}
    if misses:
        rows.append(
            {"": "damaged", "value": ", ".join(f"{count:,} {name}" for name, count in misses.items())}
        )
    yield TextTable(f"{series['layout']}: {series['name']}", rows)
