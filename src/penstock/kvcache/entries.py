"""Cache entries as objects: their names in several layouts, and a footer that proves what was read.

Penstock's own entries end with a footer of one page: a magic number, the payload's length, the digests of the
key and the payload, and a checksum of the footer itself. The footer is written last, so an entry without one
was never finished. The layouts of vLLM's and LMCache's file tiers have no checksum; their entries are
verified by content.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from hashlib import blake2b, sha256
from typing import Any, Final, Literal

import numpy as np
import xxhash

LayoutName = Literal["penstock", "vllm", "lmcache"]
FOOTER_BYTES: Final = 4096
_MAGIC: Final = b"PSTKKV01"
_FIELDS: Final = struct.Struct("<8sQ16s16s")
_CHECKED: Final = struct.Struct("<Q")
_PAGE: Final = 4096
_VLLM_BLOCK_TOKENS: Final = 16
_LMCACHE_DTYPES: Final = {"float32": "float", "float16": "half", "float8": "fp8_e4m3fn"}
"""The names of types in LMCache's file names, if they differ from torch's."""


class EntryOutcome(IntEnum):
    """The outcome of an operation. `MISSING` and all later values are misses, named by what is wrong."""

    NOT_RUN = 0
    DONE = 1
    MISSING = 2
    TRUNCATED = 3
    TORN = 4
    FLIPPED = 5
    FOREIGN = 6
    UNREADABLE = 7


MISSES: Final = tuple(outcome for outcome in EntryOutcome if outcome >= EntryOutcome.MISSING)


def vllm_folder(config: Mapping[str, Any]) -> str:
    """Return the name that vLLM gives to the folder of this configuration."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    digest = sha256(canonical.encode()).hexdigest()[:12]
    return f"{str(config['model_name']).replace('/', '_')}_{digest}"


def key_digest(key: str) -> bytes:
    """Return the digest of a key, as its footer stores it."""
    return blake2b(key.encode(), digest_size=16).digest()


def make_footer(key: str, payload_bytes: int, payload_digest: bytes) -> bytes:
    """Return the last page of an entry."""
    fields = _FIELDS.pack(_MAGIC, payload_bytes, key_digest(key), payload_digest)
    return (fields + _CHECKED.pack(xxhash.xxh3_64_intdigest(fields))).ljust(FOOTER_BYTES, b"\0")


def judge_footer(footer: memoryview, key: str, payload_bytes: int, payload_digest: bytes) -> EntryOutcome:
    """Return `DONE` if an entry of the right size is this key's, complete and unchanged, else the fault."""
    if not np.frombuffer(footer, np.uint8).any():
        return EntryOutcome.TORN
    fields = bytes(footer[: _FIELDS.size])
    (checked,) = _CHECKED.unpack_from(footer, _FIELDS.size)
    if (
        xxhash.xxh3_64_intdigest(fields) != checked
        or np.frombuffer(footer[_FIELDS.size + _CHECKED.size :], np.uint8).any()
    ):
        return EntryOutcome.FLIPPED
    magic, length, of_key, of_payload = _FIELDS.unpack(fields)
    if magic != _MAGIC or length != payload_bytes or of_key != key_digest(key):
        return EntryOutcome.FOREIGN
    return EntryOutcome.DONE if of_payload == payload_digest else EntryOutcome.FLIPPED


def stated_digest(footer: memoryview) -> bytes | None:
    """Return the payload digest in a footer, valid or not; None if the page is not a footer."""
    magic, _, _, of_payload = _FIELDS.unpack_from(footer)
    return bytes(of_payload) if magic == _MAGIC else None


def has_zero_page(content: memoryview) -> bool:
    """Return True if a page never arrived: pages of entries are random, pages lost in a crash are zeros."""
    pages = np.frombuffer(content[: len(content) // _PAGE * _PAGE], np.uint64).reshape(-1, _PAGE // 8)
    return bool((~pages.any(axis=1)).any())


@dataclass(frozen=True, kw_only=True)
class EntryLayout:
    """The names of entries, and whether they have a footer.

    `namespace` separates the entries of several workloads in one store. `parts` is the number of objects of
    an entry, one for each worker of vLLM and LMCache: `pipeline` times the number of tensor-parallel ranks.
    All entries lie below `folder`.
    """

    name: LayoutName = "penstock"
    namespace: str
    model: str = ""
    chunk_tokens: int = 0
    parts: int = 1
    pipeline: int = 1
    layers: int = 0
    dtype: str = "float16"
    folder: str = ""

    @property
    def footer_bytes(self) -> int:
        """The bytes of an entry beyond its payload.

        An entry without a footer is compared with the original instead.
        """
        return FOOTER_BYTES if self.name == "penstock" else 0

    @cached_property
    def _vllm_folder(self) -> str:
        """The name of vLLM's folder, cached because it takes long to compute."""
        return vllm_folder(self.vllm_configuration())

    def vllm_configuration(self) -> dict[str, Any]:
        """Return the configuration that vLLM hashes into its folders' names and stores in `config.json`."""
        block = _VLLM_BLOCK_TOKENS if self.chunk_tokens % _VLLM_BLOCK_TOKENS == 0 else self.chunk_tokens
        layers = [f"model.layers.{number}.self_attn.attn" for number in range(self.layers)]
        return {
            "model_name": self.model,
            "tokens_per_hash": block,
            "blocks_per_file": self.chunk_tokens // block if block else 0,
            "tp_size": self.parts // self.pipeline,
            "pp_size": self.pipeline,
            "pcp_size": 1,
            "dcp_size": 1,
            "dtype": f"torch.{self.dtype}",
            "kv_cache_groups": [{"tokens_per_block": block, "layer_names": layers}],
            "inference_engine": "vllm",
            "parallel_agnostic": False,
        }

    def side_files(self) -> dict[str, bytes]:
        """Return the files that the layout's engine writes once, next to its entries."""
        if self.name != "vllm":
            return {}
        prefix = f"{self.folder}/" if self.folder else ""
        content = json.dumps(self.vllm_configuration(), indent=2, sort_keys=True).encode()
        return {f"{prefix}{self._vllm_folder}/config.json": content}

    def key(self, entry: int, part: int) -> str:
        """Return the key of one object of an entry."""
        prefix = f"{self.folder}/" if self.folder else ""
        size = 32 if self.name == "vllm" else 16
        digest = blake2b(f"{self.namespace}:{entry}".encode(), digest_size=size).hexdigest()
        if self.name == "vllm":
            return f"{prefix}{self._vllm_folder}_r{part}/{digest[:3]}/{digest[3:5]}_g0/{digest}.bin"
        if self.name == "lmcache":
            model = self.model.replace("/", "-")
            dtype = _LMCACHE_DTYPES.get(self.dtype, self.dtype)
            return f"{prefix}{model}@{self.parts}@{part}@{digest[:16]}@{dtype}.pt"
        return f"{prefix}{digest[:2]}/{digest}.{part}.kv"
