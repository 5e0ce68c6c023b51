"""Inspect a store of cache entries: read and judge entries of vLLM's, LMCache's and our own file tiers.

Entries of one configuration form a series. Sizes and headers show which entries are torn without reading
their contents. With `verifies`, contents are read too: those of our own entries are compared with their
checksums; entries of vLLM and LMCache have none, so they are searched for pages that never arrived. Nothing
is changed.
"""

import re
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import PurePosixPath
from typing import Any, Final, Literal, Self

import xxhash

from penstock.errors import StorageError
from penstock.kvcache import entries
from penstock.kvcache.entries import FOOTER_BYTES, EntryOutcome, vllm_folder
from penstock.kvcache.models import MODELS, KvModel
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.files.file_storage import unfinished_objects
from penstock.storage.files.local_files import parse_json
from penstock.storage.protocol import MOST_BYTES, ObjectInfo, Source, read_object

Tier = Literal["vllm", "lmcache-disk", "lmcache-fs", "lmcache-l2", "penstock"]
CONFIG: Final = "config.json"
_VLLM: Final = re.compile(
    r"(?P<base>[^/]+_[0-9a-f]{12})_r(?P<rank>\d+)/(?P<first>[0-9a-f]{3})/(?P<second>[0-9a-f]{2})"
    r"_g(?P<group>\d+)/(?P<hash>[0-9a-f]{8,128})\.bin"
)
_VLLM_CONFIG: Final = re.compile(r"(?P<base>[^/]+_[0-9a-f]{12})/config\.json")
_LMCACHE: Final = re.compile(
    r"(?:(?P<format>[a-z_]+)@)?(?P<model>[^@/]+)@(?P<ranks>\d+)@(?P<rank>\d+)@(?P<hash>-?[0-9a-f]{4,128})"
    r"(?:@(?P<older_layer>\d+)(?=[@.]))?(?:@(?P<dtype>[a-z][\w.]*?))?(?:@(?P<layer>\d+)(?=[@.]))?"
    r"(?P<tags>(?:@[^@%/]+%[^@/]*)*)\.(?P<kind>pt|data)"
)
_LMCACHE_L2: Final = re.compile(
    r"(?P<model>[^@/]+)@0x(?P<ranks>[0-9a-f]{2,4})(?P<rank>[0-9a-f]{2})[0-9a-f]{4}"
    r"(?:@(?P<group>[0-9a-f]{1,3}))?@(?P<hash>[0-9a-f]{8,128})(?:@(?P<salt>[^@/]+))?\.data"
)
"""The hexadecimal number consists of the number of ranks, this rank, the number of ranks on its host, and its
number among these.
"""
_SLASH: Final = "-SEP-"
_PENSTOCK: Final = re.compile(r"(?P<first>[0-9a-f]{2})/(?P<hash>[0-9a-f]{32})\.(?P<part>\d+)\.kv")
_UNFINISHED: Final = re.compile(r".*\.tmp|\.penstock-.*")


_CHUNK_BYTES: Final = 8 << 20
_READERS: Final = 8
_MOST_NAMED: Final = 20
_MOST_GROUPS: Final = 8
_LENGTH_AND_ORDER: Final = struct.Struct("<2i")
_GROUP: Final = struct.Struct("<5i")
_ITEM_BYTES: Final = (1, 2, 2, 2, 4, 8, 1, 1, 1)
"""Bytes per element by LMCache's number of the type: none, half, half, bfloat16, float, double, and three
types of one byte.
"""
_TOKENS_THIRD: Final = (1, 6)
"""LMCache's numbers for the order keys and values x layers x tokens x width, and for its counterpart with
MLA.
"""


@dataclass(frozen=True, slots=True)
class _Header:
    """The header of LMCache's fs tier, which files have unless `save_chunk_meta` is off.

    It consists of the payload's length, the order of its dimensions, and for each group of layers the element
    type and four sizes; unused sizes at the end are 0. The shapes take as many bytes as the length says.
    """

    size_bytes: int
    payload_bytes: int
    tokens: int

    @classmethod
    def parse(cls, beginning: bytes) -> Self | None:
        """Parse the header of a file; None if it does not begin with one."""
        if len(beginning) < _LENGTH_AND_ORDER.size:
            return None
        length, order = _LENGTH_AND_ORDER.unpack_from(beginning)
        total, end = 0, _LENGTH_AND_ORDER.size
        tokens = 0
        while end + _GROUP.size <= len(beginning):
            kind, *sizes = _GROUP.unpack_from(beginning, end)
            end += _GROUP.size
            if not 0 <= kind < len(_ITEM_BYTES) or min(sizes) < 0 or not sizes[0]:
                return None
            total += _ITEM_BYTES[kind] * prod(filter(None, sizes))
            tokens = sizes[2] if order in _TOKENS_THIRD else 0
            if total == length:
                return cls(end, length, tokens)
        return None


@dataclass(slots=True, kw_only=True)
class StoredEntry:
    """A file of a store.

    Files with the same `series` and `hash` are the parts of one block, one for each rank. `layer` is set by
    engines that store each layer separately. `base` is where the series lies below the root; `is_in_place`
    tells whether the file lies where its name says, and `why` what is wrong with it.
    """

    info: ObjectInfo
    tier: Tier
    base: str
    series: str
    hash: str
    rank: int
    ranks: int | None = None
    layer: int | None = None
    model: str = ""
    dtype: str = ""
    is_in_place: bool = True
    header: _Header | None = None
    outcome: EntryOutcome = EntryOutcome.DONE
    why: str = ""
    is_partial: bool = False

    def judge(self, outcome: EntryOutcome, why: str) -> None:
        """Set the outcome unless there is one already: only the first problem counts."""
        if self.outcome is EntryOutcome.DONE:
            self.outcome, self.why = outcome, why


def find_entry(info: ObjectInfo) -> StoredEntry | None:
    """Recognize the entry in a file by its path; None if the path matches no layout."""
    parts = PurePosixPath(info.key).parts
    for depth, pattern, read in (
        (4, _VLLM, _read_vllm),
        (2, _PENSTOCK, _read_penstock),
        (1, _LMCACHE, _read_lmcache),
        (1, _LMCACHE_L2, _read_lmcache_l2),
    ):
        if match := pattern.fullmatch("/".join(parts[-depth:])):
            return read(info, "/".join(parts[:-depth]), match)
    return None


def _read_vllm(info: ObjectInfo, base: str, match: re.Match[str]) -> StoredEntry:
    series = _joined(base, match["base"])
    return StoredEntry(
        info=info,
        tier="vllm",
        base=series,
        series=f"{series}, group {match['group']}",
        hash=match["hash"],
        rank=int(match["rank"]),
        model=match["base"].rpartition("_")[0],
        is_in_place=match["hash"].startswith(match["first"] + match["second"]),
    )


def _read_penstock(info: ObjectInfo, base: str, match: re.Match[str]) -> StoredEntry:
    return StoredEntry(
        info=info,
        tier="penstock",
        base=base,
        series=base or ".",
        hash=match["hash"],
        rank=int(match["part"]),
        is_in_place=match["hash"].startswith(match["first"]),
    )


def _read_lmcache(info: ObjectInfo, base: str, match: re.Match[str]) -> StoredEntry:
    identity = "@".join(filter(None, (match["model"], match["ranks"], match["dtype"])))
    layer = match["layer"] or match["older_layer"]
    return StoredEntry(
        info=info,
        tier="lmcache-disk" if match["kind"] == "pt" else "lmcache-fs",
        base=base,
        series=_joined(base, identity + match["tags"]),
        hash=match["hash"],
        rank=int(match["rank"]),
        ranks=int(match["ranks"]),
        layer=int(layer) if layer else None,
        model=match["model"].replace(_SLASH, "/"),
        dtype=match["dtype"] or "",
        is_in_place=int(match["rank"]) < int(match["ranks"]),
    )


def _read_lmcache_l2(info: ObjectInfo, base: str, match: re.Match[str]) -> StoredEntry:
    ranks, rank, group = int(match["ranks"], 16), int(match["rank"], 16), int(match["group"] or "0", 16)
    identity = "@".join(filter(None, (match["model"], f"{ranks}", match["salt"])))
    return StoredEntry(
        info=info,
        tier="lmcache-l2",
        base=base,
        series=f"{_joined(base, identity)}, group {group}",
        hash=match["hash"],
        rank=rank,
        ranks=ranks,
        model=match["model"].replace(_SLASH, "/"),
        is_in_place=rank < ranks,
    )


def _joined(base: str, name: str) -> str:
    return f"{base}/{name}" if base else name


def inspect_store(
    storage: Storage,
    progress: Progress,
    *,
    model: KvModel | None = None,
    verifies: bool = False,
) -> dict[str, Any]:
    """Describe all series of a store, with what is wrong in them, as plain data.

    `model` gives the bytes that a token takes, if nothing in the store does.
    """
    by_name: dict[str, list[StoredEntry]] = {}
    configs: dict[str, Mapping[str, Any] | str] = {}
    unfinished: list[ObjectInfo] = []
    unknown: list[ObjectInfo] = []
    for info in storage.list():
        path = PurePosixPath(info.key)
        if _VLLM_CONFIG.fullmatch("/".join(path.parts[-2:])):
            configs[str(path.parent)] = _read_config(storage, info)
        elif _UNFINISHED.fullmatch(path.name):
            unfinished.append(info)
        elif entry := find_entry(info):
            by_name.setdefault(f"{entry.tier}:{entry.series}", []).append(entry)
        else:
            unknown.append(info)
    unfinished += [
        ObjectInfo(key=name, size_bytes=entry.size_bytes, modified_s=entry.modified_s)
        for name, entry in unfinished_objects(storage)
    ]
    named = sorted(by_name.items())
    all_entries = [entry for series in by_name.values() for entry in series]
    progress.begin("entries", len(all_entries))
    with ThreadPoolExecutor(_READERS, "inspect") as pool:
        with_headers = [entry for entry in all_entries if entry.tier == "lmcache-fs"]
        list(pool.map(lambda entry: _read_header(storage, entry), with_headers))
        described = [_describe(name, series, configs.get(series[0].base), model) for name, series in named]
        for _ in pool.map(lambda entry: _judge_content(storage, entry, verifies=verifies), all_entries):
            progress.advance(1)
    counted = [_count(of, facts["ranks"]) for facts, (_, of) in zip(described, named, strict=True)]
    wrong = [entry for entry in all_entries if entry.outcome is not EntryOutcome.DONE]
    return {
        "target": storage.uri,
        "verified": verifies,
        "entries": len(all_entries),
        "bytes": sum(entry.info.size_bytes for entry in all_entries),
        "series": [facts | counts for facts, counts in zip(described, counted, strict=True)],
        "damaged": len(wrong),
        "wrong": [
            {"key": entry.info.key, "outcome": entry.outcome.name.lower(), "why": entry.why}
            for entry in wrong[:_MOST_NAMED]
        ],
        "unfinished": _sum_up(unfinished),
        "unknown": _sum_up(unknown),
    }


def _read_config(storage: Storage, info: ObjectInfo) -> Mapping[str, Any] | str:
    """Read the configuration in one of vLLM's folders, or say what is wrong with it."""
    if info.size_bytes > MOST_BYTES:
        return f"{CONFIG} has {info.size_bytes:,} bytes"
    try:
        config = parse_json(bytes(read_object(storage, info.key)))
    except (StorageError, ValueError) as error:
        return f"{CONFIG} cannot be read: {error}"
    if not isinstance(config, dict) or "model_name" not in config:
        return f"{CONFIG} names no model"
    is_its_own = vllm_folder(config) == info.key.split("/")[-2]
    return config if is_its_own else f"{CONFIG} does not match the name of its folder"


def _describe(
    name: str, series: Sequence[StoredEntry], config: Mapping[str, Any] | str | None, model: KvModel | None
) -> dict[str, Any]:
    """Describe a series, and judge the sizes and places of its entries."""
    first = series[0]
    facts: Mapping[str, Any] = config if isinstance(config, dict) else {}
    present = {entry.rank for entry in series}
    if facts:
        sizes = ("tp_size", "pp_size", "pcp_size", "dcp_size")
        ranks = prod(_whole(facts, size, 1) for size in sizes)
    elif first.ranks is not None:
        # If all ranks share a latent, LMCache lets the first rank store it for all.
        ranks = first.ranks if len(present) > 1 else 1
    else:
        ranks = max(present) + 1
    # The entries of a rank for each block: one, or one for each layer.
    layers = len({entry.layer for entry in series})
    tokens = _whole(facts, "tokens_per_hash") * _whole(facts, "blocks_per_file")
    full_bytes = _full_bytes(series)
    token_bytes = model.bytes_per_token / ranks / layers if model else None
    _judge_headers(series)
    for entry in series:
        _judge_size(entry, full_bytes[entry.rank], token_bytes)
    tokens = tokens or max(entry.header.tokens if entry.header else 0 for entry in series)
    if not tokens and token_bytes:
        tokens = round(max(full_bytes.values()) / token_bytes)
    bytes_per_token = layers * sum(full_bytes.values()) / tokens if tokens and len(present) == ranks else None
    num_blocks = len({entry.hash for entry in series})
    problem = config if isinstance(config, str) else None
    if first.tier == "vllm" and config is None:
        problem = f"there is no {CONFIG}"
    return {
        "name": name.partition(":")[2],
        "layout": first.tier,
        "model": str(facts.get("model_name", first.model)) or None,
        "dtype": str(facts.get("dtype", first.dtype)) or None,
        "config": dict(facts) or None,
        "config_problem": problem,
        "entries": len(series),
        "bytes": sum(entry.info.size_bytes for entry in series),
        "ranks": ranks,
        "blocks": num_blocks,
        "entry_bytes": max(full_bytes.values()),
        "tokens_per_entry": tokens or None,
        "tokens": tokens * num_blocks or None,
        "bytes_per_token": bytes_per_token,
        "like_models": [
            known.name
            for known in MODELS.values()
            if bytes_per_token and known.bytes_per_token == bytes_per_token
        ],
        "oldest_s": min(entry.info.modified_s or 0.0 for entry in series),
        "newest_s": max(entry.info.modified_s or 0.0 for entry in series),
    }


def _whole(facts: Mapping[str, Any], name: str, otherwise: int = 0) -> int:
    value = facts.get(name)
    return value if isinstance(value, int) and value > 0 else otherwise


def _full_bytes(series: Sequence[StoredEntry]) -> dict[int, int]:
    """Return the payload size of a complete entry, by rank: the most frequent size, on a tie the largest."""
    sizes: dict[int, Counter[int]] = {}
    for entry in series:
        overhead = FOOTER_BYTES if entry.tier == "penstock" else 0
        overhead = entry.header.size_bytes if entry.header else overhead
        sizes.setdefault(entry.rank, Counter())[entry.info.size_bytes - overhead] += 1
    return {rank: max(counts, key=lambda size: (counts[size], size)) for rank, counts in sizes.items()}


def _judge_headers(series: Sequence[StoredEntry]) -> None:
    """Judge entries by their headers.

    In a store of LMCache, either all entries of a series have a header, or none has.
    """
    headers = [entry.header for entry in series if entry.header]
    if not headers:
        return
    least_bytes = headers[0].size_bytes
    for entry in series:
        if entry.header is None and entry.info.size_bytes < least_bytes:
            entry.judge(EntryOutcome.TRUNCATED, "it is shorter than its header")
        if entry.header is None:
            entry.judge(EntryOutcome.FLIPPED, "it does not begin with the header that others have")
            continue
        payload_bytes = entry.info.size_bytes - entry.header.size_bytes
        if payload_bytes != (stated_bytes := entry.header.payload_bytes):
            outcome = EntryOutcome.TRUNCATED if payload_bytes < stated_bytes else EntryOutcome.FOREIGN
            entry.judge(outcome, f"{payload_bytes:,} B, its header says {stated_bytes:,}")


def _judge_size(entry: StoredEntry, full_bytes: int, token_bytes: float | None) -> None:
    """Judge an entry by place and size. Our own entries, and entries with headers, state their length."""
    size = entry.info.size_bytes
    if not entry.is_in_place:
        entry.judge(EntryOutcome.FOREIGN, "its engine would not look for it here")
    elif not size:
        entry.judge(EntryOutcome.TRUNCATED, "it is empty")
    elif entry.tier == "vllm" and size != full_bytes:
        outcome = EntryOutcome.TRUNCATED if size < full_bytes else EntryOutcome.FOREIGN
        entry.judge(outcome, f"{size:,} B, others have {full_bytes:,}")
    elif entry.tier.startswith("lmcache") and entry.header is None and size < full_bytes:
        entry.is_partial = True  # the end of a prompt, unless it is not a whole number of tokens
        if token_bytes and size % token_bytes:
            entry.judge(EntryOutcome.TRUNCATED, f"{size:,} B are not a whole number of tokens")


def _judge_content(storage: Storage, entry: StoredEntry, *, verifies: bool) -> None:
    reads = verifies or entry.tier == "penstock"
    if entry.outcome is not EntryOutcome.DONE or not reads:
        return
    try:
        with closing(storage.open(entry.info.key)) as source:
            if entry.tier == "penstock":
                _judge_own(source, entry, verifies=verifies)
                return
            if any(map(entries.has_zero_page, _chunks(source, source.size_bytes))):
                entry.judge(EntryOutcome.TORN, "it has pages of zeros: they may never have arrived")
    except StorageError as error:
        entry.judge(EntryOutcome.UNREADABLE, str(error))


def _judge_own(source: Source, entry: StoredEntry, *, verifies: bool) -> None:
    """Judge one of our own entries by its footer, which has all the facts."""
    footer = memoryview(bytearray(FOOTER_BYTES))
    payload_bytes = source.size_bytes - FOOTER_BYTES
    if payload_bytes < 1:
        entry.judge(EntryOutcome.TRUNCATED, "it is shorter than an entry's footer")
        return
    source.read_into(payload_bytes, footer)
    stated = entries.stated_digest(footer)
    digest = stated or b""
    if verifies:
        computed = xxhash.xxh3_128()
        for chunk in _chunks(source, payload_bytes):
            computed.update(chunk)
        digest = computed.digest()
    # The name below the root under which it was written, which may lie above the folder inspected here.
    parts = entry.info.key.split("/")
    names = ["/".join(parts[start:]) for start in range(len(parts) - 1)]
    judged = [entries.judge_footer(footer, name, payload_bytes, digest) for name in names]
    if judged[-1] is EntryOutcome.FLIPPED and stated is None:
        entry.judge(EntryOutcome.TRUNCATED, "it does not end with a footer")
    elif EntryOutcome.DONE not in judged:
        outcome = EntryOutcome.FLIPPED if EntryOutcome.FLIPPED in judged else judged[-1]
        entry.judge(outcome, "its footer does not match it")


def _read_header(storage: Storage, entry: StoredEntry) -> None:
    try:
        with closing(storage.open(entry.info.key)) as source:
            most = _LENGTH_AND_ORDER.size + _MOST_GROUPS * _GROUP.size
            beginning = bytearray(min(most, source.size_bytes))
            source.read_into(0, memoryview(beginning))
            entry.header = _Header.parse(bytes(beginning))
    except StorageError as error:
        entry.judge(EntryOutcome.UNREADABLE, str(error))


def _chunks(source: Source, size_bytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(size_bytes, 1))))
    for offset in range(0, size_bytes, len(buffer)):
        chunk = buffer[: min(len(buffer), size_bytes - offset)]
        source.read_into(offset, chunk)
        yield chunk


def _count(series: Sequence[StoredEntry], ranks: int) -> dict[str, Any]:
    wrong = Counter(entry.outcome.name.lower() for entry in series if entry.outcome is not EntryOutcome.DONE)
    whole = [entry for entry in series if entry.outcome is EntryOutcome.DONE]
    parts = Counter(entry.hash for entry in whole)
    layers = len({entry.layer for entry in series})
    return {
        "whole": len(whole),
        "partial": sum(entry.is_partial for entry in whole),
        "usable_blocks": sum(count >= ranks * layers for count in parts.values()),
        "misses": {outcome.name.lower(): wrong[outcome.name.lower()] for outcome in entries.MISSES},
    }


def _sum_up(objects: Sequence[ObjectInfo]) -> dict[str, Any]:
    now_s = time.time()
    return {
        "objects": len(objects),
        "bytes": sum(info.size_bytes for info in objects),
        "oldest_age_s": max((now_s - (info.modified_s or now_s) for info in objects), default=None),
        "examples": [info.key for info in objects[:3]],
    }
