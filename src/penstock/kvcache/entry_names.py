"""The names that file tiers of engines give to entries, read back: whose entry a file is, by its path. Pure.

    vLLM      ROOT/MODEL_DIGEST/config.json, ROOT/MODEL_DIGEST_rRANK/HHH/HH_gGROUP/HASH.bin
    LMCache   ROOT/[FORMAT@]MODEL@RANKS@RANK@HASH[@DTYPE][@LAYER][@TAG%VALUE].pt (disk), the same .data (fs)
              ROOT/MODEL@0xRANKS_AND_RANK[@GROUP]@HASH[@SALT].data (its server's files, l2)
    Penstock  ROOT/HH/HASH.PART.kv

Names that none of them gives are of no layout; a file that lies in another folder than its name says is no
entry for its engine.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, Literal

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
"""The number has a byte each for: all ranks, this rank, the ranks of its host, and this one among them."""
_SLASH: Final = "-SEP-"
_PENSTOCK: Final = re.compile(r"(?P<first>[0-9a-f]{2})/(?P<hash>[0-9a-f]{32})\.(?P<part>\d+)\.kv")
_UNFINISHED: Final = re.compile(r".*\.tmp|\.penstock-.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryName:
    """An entry's identity: those with one `series` and `hash` are the parts that ranks keep of one block.

    `layer` is of engines that keep each layer apart. `base` is where the series lies below the root;
    `is_in_place` whether the file lies where its name says.
    """

    tier: Tier
    base: str
    series: str
    hash: str
    rank: int
    ranks: int | None = None
    group: int = 0
    layer: int | None = None
    model: str = ""
    dtype: str = ""
    is_in_place: bool = True


def parse_entry_name(key: str) -> EntryName | None:
    """Whose entry a file is; None where no layout has such names."""
    parts = PurePosixPath(key).parts
    readers = ((4, _parse_vllm), (2, _parse_penstock), (1, _parse_lmcache), (1, _parse_lmcache_l2))
    for depth, parse in readers:
        if len(parts) >= depth and (found := parse("/".join(parts[:-depth]), "/".join(parts[-depth:]))):
            return found
    return None


def _parse_vllm(base: str, tail: str) -> EntryName | None:
    if (match := _VLLM.fullmatch(tail)) is None:
        return None
    digest = match["hash"]
    series = _joined(base, match["base"])
    return EntryName(
        tier="vllm",
        base=series,
        series=f"{series}, group {match['group']}",
        hash=digest,
        rank=int(match["rank"]),
        group=int(match["group"]),
        model=match["base"].rpartition("_")[0],
        is_in_place=digest.startswith(match["first"] + match["second"]),
    )


def _parse_penstock(base: str, tail: str) -> EntryName | None:
    if (match := _PENSTOCK.fullmatch(tail)) is None:
        return None
    return EntryName(
        tier="penstock",
        base=base,
        series=base or ".",
        hash=match["hash"],
        rank=int(match["part"]),
        is_in_place=match["hash"].startswith(match["first"]),
    )


def _parse_lmcache(base: str, tail: str) -> EntryName | None:
    if (match := _LMCACHE.fullmatch(tail)) is None:
        return None
    tier: Tier = "lmcache-disk" if match["kind"] == "pt" else "lmcache-fs"
    identity = "@".join(filter(None, (match["model"], match["ranks"], match["dtype"])))
    layer = match["layer"] or match["older_layer"]
    return EntryName(
        tier=tier,
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


def _parse_lmcache_l2(base: str, tail: str) -> EntryName | None:
    if (match := _LMCACHE_L2.fullmatch(tail)) is None:
        return None
    ranks, rank, group = int(match["ranks"], 16), int(match["rank"], 16), int(match["group"] or "0", 16)
    identity = "@".join(filter(None, (match["model"], f"{ranks}", match["salt"])))
    return EntryName(
        tier="lmcache-l2",
        base=base,
        series=f"{_joined(base, identity)}, group {group}",
        hash=match["hash"],
        rank=rank,
        ranks=ranks,
        group=group,
        model=match["model"].replace(_SLASH, "/"),
        is_in_place=rank < ranks,
    )


def _joined(base: str, name: str) -> str:
    return f"{base}/{name}" if base else name


def config_base(key: str) -> str | None:
    """The folder whose config.json of vLLM's this is, None for other files."""
    parts = PurePosixPath(key).parts
    tail = "/".join(parts[-2:])
    return "/".join(parts[:-1]) if _VLLM_CONFIG.fullmatch(tail) else None


def is_unfinished_entry(name: str) -> bool:
    """Whether engines give such names to what they have not finished."""
    return _UNFINISHED.fullmatch(PurePosixPath(name).name) is not None


def vllm_folder(config: Mapping[str, Any]) -> str:
    """The name of the folder that vLLM gives to this configuration."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()[:12]
    return f"{str(config['model_name']).replace('/', '_')}_{digest}"
