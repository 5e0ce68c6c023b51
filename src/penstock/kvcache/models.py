"""The bytes of key-value cache that a token takes, by model, and their division by ranks and layers.

Attention with heads (MHA, GQA, MQA) keeps a key and a value per head. Multi-head latent attention (MLA) keeps
one latent vector and one rotary key for all heads, so the factor 2 does not apply. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.did_you_mean import did_you_mean
from penstock.errors import UsageError
from penstock.kvcache.block_trace import BlockTrace, find_reuse
from penstock.storage.files.local_files import parse_json, read_document

DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvModel:
    """The sizes of a model that determine its cache.

    `latent_dims` is all that MLA keeps per layer: the compressed latent (kv_lora_rank), the rotary key
    (qk_rope_head_dim) and, if attention is sparse, the key of its indexer. It is 0 without MLA.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    latent_dims: int = 0
    dtype: str = "float16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UsageError(
                f"Unknown data type of a cache: {self.dtype!r}",
                where=self.name,
                fix=f"Choose from: {', '.join(DTYPE_BYTES)}.",
            )
        for field in ("layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise UsageError(
                    f"The model's {field} is below 1", where=self.name, fix="Give a number above 0."
                )

    @property
    def attention(self) -> str:
        """The kind of attention: mla, mha or gqa."""
        if self.latent_dims:
            return "mla"
        return "mha" if self.kv_heads == self.heads else "gqa"

    @property
    def layer_bytes_per_token(self) -> int:
        """The bytes that one layer keeps for each token."""
        elements = self.latent_dims or 2 * self.kv_heads * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """The bytes that all layers keep for each token."""
        return self.layers * self.layer_bytes_per_token

    def rank_bytes_per_token(self, *, tensor: int = 1, pipeline: int = 1) -> int:
        """Return the most bytes a rank keeps per token: tensor ranks divide heads, pipeline ranks layers.

        If there are more tensor ranks than KV heads, ranks share heads; with MLA, every tensor rank has the
        whole latent.
        """
        layers = -(-self.layers // pipeline)
        if self.latent_dims:
            return layers * self.layer_bytes_per_token
        heads = -(-self.kv_heads // tensor)
        return layers * 2 * heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def say_uneven(self, *, tensor: int, pipeline: int) -> list[str]:
        """Say in sentences what these ranks cannot divide evenly."""
        heads = (1, "latent of MLA") if self.latent_dims else (self.kv_heads, f"{self.kv_heads} KV heads")
        return [
            f"The {what} cannot be divided evenly among {ranks} ranks."
            for (count, what), ranks in ((heads, tensor), ((self.layers, f"{self.layers} layers"), pipeline))
            if count % ranks
        ]


_SHIPPED: Final = (
    ("tiny-1b", 12, 8, 4, 128, 0),
    ("mistral-7b", 32, 32, 8, 128, 0),
    ("llama2-7b", 32, 32, 32, 128, 0),
    ("llama3.1-8b", 32, 32, 8, 128, 0),
    ("llama3.1-70b-instruct", 80, 64, 8, 128, 0),
    ("deepseek-v3", 61, 128, 128, 128, 512 + 64),
    ("qwen3-32b", 64, 64, 8, 128, 0),
    ("gpt-oss-120b", 36, 64, 8, 64, 0),
    ("gpt-oss-20b", 24, 64, 8, 64, 0),
    ("glm5", 78, 64, 64, 128, 512 + 64 + 128),
    ("kimi-k2.6", 61, 64, 64, 128, 512 + 64),
)
"""Name, layers, attention heads, KV heads, dimensions of a KV head, and dimensions of MLA's latent."""
MODELS: Final[Mapping[str, KvModel]] = {
    name: KvModel(
        name=name, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, latent_dims=latent
    )
    for name, layers, heads, kv_heads, head_dim, latent in _SHIPPED
}


def find_model(name: str, *, dtype: str | None = None) -> KvModel:
    """Find the model called `name`, or read it from a `config.json` of Hugging Face.

    `dtype` replaces the type of the cache's elements.
    """
    found = MODELS.get(name)
    if found is None and (path := Path(name)).is_file():
        found = _read_config(path)
    if found is not None:
        if dtype is None or dtype == found.dtype:
            return found
        return replace(found, name=f"{found.name}, {dtype}", dtype=dtype)
    raise UsageError(
        f"Unknown model {name!r}",
        fix=f"{did_you_mean(name, MODELS)}`penstock kvcache models` lists them; a config.json works, too.",
    )


def _read_config(path: Path) -> KvModel:
    try:
        config = parse_json(read_document(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot read this model: {error}", where=str(path)) from error
    if not isinstance(config, dict):
        raise UsageError("This is not a model's configuration", where=str(path), fix="Give its config.json.")
    heads = _number(config, "num_attention_heads", path)
    latent_dims = 0
    if config.get("kv_lora_rank"):
        latent_dims = _number(config, "kv_lora_rank", path) + _number(config, "qk_rope_head_dim", path)
        latent_dims += _number(config, "index_head_dim", path, 0)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "float16")
    return KvModel(
        name=path.parent.name or path.name,
        layers=_number(config, "num_hidden_layers", path),
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads", path, heads),
        head_dim=_number(config, "head_dim", path, 0) or _number(config, "hidden_size", path) // heads,
        latent_dims=latent_dims,
        dtype=dtype,
    )


def _number(config: Mapping[str, Any], key: str, path: Path, otherwise: int | None = None) -> int:
    value = config.get(key) or otherwise
    if not isinstance(value, int) or not (otherwise != 0) <= value < 1 << 40:
        raise UsageError(
            f"{key} is {value!r}, not a number in its range", where=str(path), fix=f"Set {key} in it."
        )
    return value


UPSTREAM_BYTES_PER_TOKEN: Final[Mapping[str, int]] = {
    "tiny-1b": 768,
    "mistral-7b": 4096,
    "llama2-7b": 8192,
    "llama3.1-8b": 4096,
    "llama3.1-70b-instruct": 16_384,
}
"""The bytes per token in MLPerf Storage v3.0's `datasize`: 20 to 64 times less than what its run writes."""
_TYPICAL_TOKENS: Final[Mapping[str, int]] = {
    "tiny-1b": 2048,
    "mistral-7b": 4096,
    "llama2-7b": 4096,
    "llama3.1-8b": 8192,
    "llama3.1-70b-instruct": 8192,
}
DEFAULT_TOKENS: Final = 8192
_HIT_SHARES: Final = (0.5, 0.9, 0.99)


def size_for_users(
    model: KvModel, users: int, *, tokens: int | None = None, tensor: int = 1, pipeline: int = 1
) -> dict[str, Any]:
    """Return the bytes of all users' contexts, as plain data, next to the v3.0 tool's figures.

    Each user has `tokens` of context, by default a number typical of the model.
    """
    tokens = _TYPICAL_TOKENS.get(model.name, DEFAULT_TOKENS) if tokens is None else tokens
    total = users * tokens * model.bytes_per_token
    document = {
        "model": model.name,
        "bytes_per_token": model.bytes_per_token,
        "ranks": tensor * pipeline,
        "rank_bytes_per_token": model.rank_bytes_per_token(tensor=tensor, pipeline=pipeline),
        "uneven": model.say_uneven(tensor=tensor, pipeline=pipeline),
        "users": users,
        "tokens_per_user": tokens,
        "user_bytes": tokens * model.bytes_per_token,
        "total_bytes": total,
        "upstream": None,
    }
    if (theirs := UPSTREAM_BYTES_PER_TOKEN.get(model.name)) is not None:
        document["upstream"] = {
            "bytes_per_token": theirs,
            "total_bytes": users * tokens * theirs,
            "times_too_small": model.bytes_per_token / theirs,
        }
    return document


def size_for_trace(trace: BlockTrace, model: KvModel) -> dict[str, Any]:
    """Return the bytes that a trace writes and can read, and the cache sizes for given shares of its hits."""
    reuse = find_reuse(trace)
    block_bytes = trace.block_tokens * model.bytes_per_token
    best = reuse.prefix_hit_ratio(None)
    hits = reuse.capacity_for_prefix[reuse.capacity_for_prefix < reuse.capacity_for_prefix.max(initial=1)]
    hits.sort()
    capacities = []
    for share in _HIT_SHARES:
        blocks = int(hits[max(0, -(-int(share * 1e6) * len(hits) // 10**6) - 1)]) if len(hits) else 0
        capacities.append(
            {"share_of_hits": share, "capacity_blocks": blocks, "capacity_bytes": blocks * block_bytes}
        )
    return {
        "model": model.name,
        "bytes_per_token": model.bytes_per_token,
        "block_tokens": trace.block_tokens,
        "block_bytes": block_bytes,
        "unique_bytes": trace.num_unique * block_bytes,
        "hit_bytes": round(best * trace.num_blocks) * block_bytes,
        "prefix_hit_ratio": best,
        "capacities": capacities,
    }
