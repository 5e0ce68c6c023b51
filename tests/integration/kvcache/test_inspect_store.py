"""Stores of vLLM's, LMCache's and our own file tiers, laid out by hand as published, are read and judged."""

import json
import os
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from penstock.kvcache.entries import EntryLayout, vllm_folder
from penstock.kvcache.inspect_store import find_entry, inspect_store
from penstock.kvcache.io_engine import EngineSettings, IoEngine
from penstock.kvcache.io_plan import OPERATION, ObjectLayout, Op
from penstock.kvcache.models import MODELS
from penstock.progress import Progress
from penstock.storage import open_storage
from penstock.storage.protocol import ObjectInfo

RANDOM = np.random.Generator(np.random.PCG64(7))
CONFIG = {
    "model_name": "meta-llama/Llama-3.1-8B",
    "tokens_per_hash": 16,
    "blocks_per_file": 2,
    "tp_size": 2,
    "pp_size": 1,
    "pcp_size": 1,
    "dcp_size": 1,
    "dtype": "torch.bfloat16",
    "kv_cache_groups": [{"tokens_per_block": 16, "layer_names": ["model.layers.0.self_attn.attn"]}],
    "inference_engine": "vllm",
    "parallel_agnostic": False,
}


def inspected(folder: Path, **settings: Any) -> dict[str, Any]:
    return inspect_store(open_storage(str(folder), {}), Progress(), **settings)


def put(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(RANDOM.bytes(size))
    return path


def vllm_store(root: Path, blocks: int = 6, size: int = 8192) -> list[Path]:
    """A store of two tensor ranks."""
    base = root / vllm_folder(CONFIG)
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(CONFIG, indent=2))
    hashes = [RANDOM.bytes(32).hex() for _ in range(blocks)]
    return [
        put(Path(f"{base}_r{rank}") / name[:3] / f"{name[3:5]}_g0" / f"{name}.bin", size)
        for rank in range(2)
        for name in hashes
    ]


def test_a_store_of_vllm_is_read_with_what_its_configuration_says(tmp_path: Path) -> None:
    vllm_store(tmp_path)
    document = inspected(tmp_path, verifies=True)
    [series] = document["series"]
    facts = [
        series[name] for name in ("layout", "model", "dtype", "ranks", "entries", "blocks", "usable_blocks")
    ]
    assert facts == ["vllm", "meta-llama/Llama-3.1-8B", "torch.bfloat16", 2, 12, 6, 6]
    assert (series["tokens_per_entry"], series["tokens"], series["bytes_per_token"]) == (32, 192, 512.0)
    assert (series["config_problem"], document["damaged"]) == (None, 0)


def test_what_is_wrong_in_a_store_of_vllm_is_named(tmp_path: Path) -> None:
    cut, empty, moved, torn, lost, *_ = files = vllm_store(tmp_path)
    cut.write_bytes(cut.read_bytes()[:5000])
    empty.write_bytes(b"")
    moved.rename(torn.with_name(moved.name))
    torn.write_bytes(bytes(4096) + torn.read_bytes()[4096:])
    lost.unlink()
    put(files[-1].with_name("ab_1234.tmp"), 100)
    put(tmp_path / "notes.txt", 10)
    document = inspected(tmp_path, verifies=True)
    [series] = document["series"]
    assert {name: count for name, count in series["misses"].items() if count} == {
        "truncated": 2,
        "foreign": 1,
        "torn": 1,
    }
    assert document["damaged"] == len(document["wrong"]) == 4
    assert (series["blocks"], series["usable_blocks"]) == (6, 1)
    assert (document["unfinished"]["objects"], document["unknown"]["examples"]) == (1, ["notes.txt"])
    next(tmp_path.glob("*/config.json")).write_text(json.dumps(CONFIG | {"tp_size": 4}))
    assert "does not match the name" in inspected(tmp_path)["series"][0]["config_problem"]
    # Sparse: it takes no room, but reading it would.
    os.truncate(next(tmp_path.glob("*/config.json")), 1 << 36)
    assert "68,719,476,736 bytes" in inspected(tmp_path)["series"][0]["config_problem"]


def test_stores_of_lmcache_have_short_ends_of_prompts_and_headers(tmp_path: Path) -> None:
    token = MODELS["llama3.1-8b"].bytes_per_token // 2
    disk = [
        f"vllm@meta-llama-Llama-3.1-8B@2@{rank}@{block:016x}@bfloat16.pt"
        for rank in (0, 1)
        for block in (1, 2)
    ]
    for name, tokens in zip(disk, (2, 1, 2, 1.5), strict=True):
        put(tmp_path / name, int(tokens * token))
    for block, stated in ((3, 5000), (4, 6000), (5, 4000)):
        path = put(tmp_path / f"meta-llama@1@0@{block:x}beef@half@tenant%a.data", 5028)
        path.write_bytes(struct.pack("<7i", stated, 1, 1, 2, 1, 1, stated // 4) + path.read_bytes()[28:])
    put(tmp_path / "meta-llama@1@0@6beef@half@tenant%a.data", 5028)
    put(tmp_path / "meta-llama@1@0@7beef@half@tenant%a.data", 20)
    document = inspected(tmp_path, model=MODELS["llama3.1-8b"])
    on_disk, in_files = sorted(document["series"], key=lambda series: series["layout"])
    assert (on_disk["layout"], on_disk["whole"], on_disk["partial"]) == ("lmcache-disk", 3, 1)
    assert (on_disk["misses"]["truncated"], on_disk["usable_blocks"]) == (1, 1)
    assert (on_disk["tokens_per_entry"], on_disk["like_models"]) == (2, ["mistral-7b", "llama3.1-8b"])
    assert (in_files["layout"], in_files["whole"]) == ("lmcache-fs", 1)
    assert [in_files["misses"][name] for name in ("truncated", "foreign", "flipped")] == [2, 1, 1]


def test_headers_of_lmcache_say_tokens_also_with_groups_of_layers_and_may_be_left_out(tmp_path: Path) -> None:
    """Laid out as version 0.5.6 does; `save_chunk_meta: false` leaves headers out."""
    groups = ((2, 2, 4, 256, 64), (3, 2, 2, 256, 32))
    payload = sum(2 * 2 * layers * tokens * width for _, _, layers, tokens, width in groups)
    for block in range(3):
        name = f"meta-SEP-llama@1@0@{block:x}beef@bfloat16"
        path = put(tmp_path / "with" / f"{name}.data", payload)
        numbers = [payload, 1, *(number for group in groups for number in group)]
        path.write_bytes(struct.pack("<12i", *numbers) + path.read_bytes())
        put(tmp_path / "without" / f"{name}.data", payload - block % 2 * payload // 4)
    for layer in range(2):
        put(tmp_path / "layers" / f"meta-llama@1@0@beef@bfloat16@{layer}.pt", 1000)
    series = inspected(tmp_path)["series"]
    with_layers, having, lacking = sorted(series, key=lambda one: one["name"])
    assert having["model"] == "meta/llama"
    assert (having["whole"], having["tokens_per_entry"]) == (3, 256)
    assert having["bytes_per_token"] * 256 == payload
    assert (lacking["whole"], lacking["partial"], lacking["tokens_per_entry"]) == (3, 1, None)
    assert (with_layers["entries"], with_layers["blocks"], with_layers["usable_blocks"]) == (2, 1, 1)


def test_files_of_lmcaches_server_say_ranks_and_group(tmp_path: Path) -> None:
    for rank in (0, 1):
        for block in ("00", "11", "22"):
            put(tmp_path / f"meta-SEP-llama@0x02{rank:02x}02{rank:02x}@0@{block}beef99.data", 4096)
    put(tmp_path / "meta-SEP-llama@0x02020200@0@33beef99.data", 4096)
    put(tmp_path / "meta-SEP-llama@0x01000100@44beef99@tenant.data", 4096)
    document = inspected(tmp_path)
    other, own = document["series"]
    assert [own[name] for name in ("layout", "model", "ranks", "usable_blocks")] == [
        "lmcache-l2",
        "meta/llama",
        2,
        3,
    ]
    assert (own["misses"]["foreign"], other["name"], other["whole"]) == (
        1,
        "meta-SEP-llama@1@tenant, group 0",
        1,
    )


def test_own_stores_prove_themselves_wherever_they_are_looked_at_from(tmp_path: Path) -> None:
    size = ObjectLayout(scale=Fraction(1, 1000)).part_bytes(MODELS["llama3.1-8b"], 256)[0]
    operations = np.zeros(5, OPERATION)
    operations["op"], operations["entry"], operations["bytes"], operations["tier"] = (
        Op.WRITE,
        range(5),
        size,
        2,
    )
    layout = EntryLayout(namespace="test", folder="rank_0")
    IoEngine(open_storage(str(tmp_path / "a"), {}), operations, layout, EngineSettings()).run()
    assert inspected(tmp_path, verifies=True)["damaged"] == 0
    flipped, cut = sorted(tmp_path.rglob("*.kv"))[:2]
    content = bytearray(flipped.read_bytes())
    content[100] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-1])
    assert inspected(tmp_path)["damaged"] == 1
    [series] = inspected(tmp_path, verifies=True)["series"]
    assert (series["misses"]["flipped"], series["misses"]["truncated"], series["whole"]) == (1, 1, 3)


def test_every_layout_that_is_written_is_read_back_by_its_name() -> None:
    for name, tier in (("penstock", "penstock"), ("vllm", "vllm"), ("lmcache", "lmcache-disk")):
        layout = EntryLayout(name=name, namespace="n", model="a/b", chunk_tokens=256, parts=2)  # type: ignore[arg-type]
        found = find_entry(ObjectInfo(key=f"below/{layout.key(3, 1)}", size_bytes=1, modified_s=0))
        assert found is not None
        assert (found.tier, found.rank, found.is_in_place) == (tier, 1, True)
