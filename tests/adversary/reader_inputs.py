"""Valid inputs of each reader of files, and the command lines that read them: where the fuzz begins.

In command lines `{}` is the folder of the input, and `{out}` one that may be written.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from safetensors.torch import save_file
from tests.support.awkward_traces import StraceProgram, write_dftracer, write_dxt, write_kineto
from tests.support.command_line import run_command
from tests.support.recorded_runs import CheckpointStory, TrainingStory, record_checkpoints, record_training
from tests.support.submission.numbered_tree import valid_submission
from tests.support.submission.timed_tree import valid_round
from tests.unit.cluster.facts.known_hosts import cluster, present
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import penstock.checkpoint as pc
from penstock.cluster.host_slots import find_hosts, place_ranks
from penstock.kvcache.entries import vllm_folder


@dataclass(frozen=True, slots=True)
class Reader:
    """What writes a valid input into a folder, and the ways to read it."""

    name: str
    make: Callable[[Path], object]
    ways: tuple[str, ...]


def write_json(path: Path, *documents: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")


# Traces.

_VERBS: Final = ("summary", "ops", "files", "classes", "sizes", "ranks", "timeline", "overlap")
QUESTIONS: Final = (
    *(f"trace {verb} {{}} --json" for verb in _VERBS),
    "trace load {} -o {out}/run.events",
    "trace export {} -o {out}/x.json",
    "trace summary {} --strict",
)


def dftracer(folder: Path) -> None:
    for generation in (1, 2, 3):
        (folder / str(generation)).mkdir()
        write_dftracer(folder / str(generation), generation, seed=1, num_files=2, num_events=15)


def chrome(folder: Path) -> None:
    write_kineto(folder / "profile.json", seed=1, num_events=20)
    write_kineto(folder / "other.json", seed=2, num_events=20)


def strace(folder: Path) -> None:
    (folder / "trace.strace").write_text(StraceProgram(1, names=True, num_calls=40).listing())
    StraceProgram(2, names=False, num_calls=30).write_one_file_a_thread(folder)


def darshan_log(folder: Path) -> None:
    known = os.environ.get("PENSTOCK_TRACE_FIXTURES", "/nowhere")
    shutil.copy(f"{known}/darshan/sample-dxt-simple.darshan", folder)


def event_table(folder: Path) -> None:
    write_dftracer(folder, 3, seed=1, num_files=2, num_events=15)
    done = run_command("trace", "load", folder, "-o", folder / "run.events")
    assert done.returncode == 0, done.stderr
    for path in folder.glob("*.pfw*"):
        path.unlink()


def comparison(folder: Path) -> None:
    for run in ("base", "new"):
        (folder / run).mkdir()
        write_dftracer(folder / run, 3, seed=len(run), num_files=1, num_events=15)
    document = {
        "runs": {"base": "base/*.pfw*", "new": ["new/*"]},
        "baseline": "base",
        "app_event": "Checkpointing.checkpoint",
        "tiers": {"lustre": "/p/lustre2", "ssd": ["/l/ssd", "/nvme"]},
        "file_classes": {"weights": "^layer-", "rest": "."},
        "phases": ["flush=name~flush"],
        "files": ["model-1-600-0.pt", "layer-*-1-600-0.pt"],
        "device_rates": {"ssd": "2.5GB/s"},
        "where": "path NOT LIKE '%/tmp/%'",
        "checks": [
            "new.ssd.max_union_us <= 1.1 * base.ssd.max_union_us",
            {
                "name": "few",
                "sql": "SELECT count(*) < 9 FROM events WHERE op = 'write' AND size_bytes < 4096",
            },
        ],
    }
    (folder / "runs.yaml").write_text(yaml.safe_dump(document))


# Checkpoints.


def state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(300.0).reshape(30, 10), "half": torch.ones(7, dtype=torch.bfloat16)},
        "layers": [torch.arange(5), {"name": "norm"}],
        "note": {"betas": (0.9, 0.95), "rng": torch.arange(9, dtype=torch.uint8), "text": "x"},
        "step": 3,
    }


def ours(folder: Path) -> None:
    with pc.Manager(folder / "run") as manager:
        manager.save(1, state())
        manager.save(2, state())


def stock(folder: Path) -> None:
    stock_save(state(), checkpoint_id=folder / "run" / "step-2")


def torch_file(folder: Path) -> None:
    torch.save(state(), folder / "model.pt")


def safetensors(folder: Path) -> None:
    save_file(
        {"w": torch.arange(60.0).reshape(6, 10), "b": torch.arange(5)},
        folder / "model.safetensors",
        metadata={"a": "b"},
    )
    tensors = {"w": "model.safetensors", "b": "model.safetensors"}
    write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": 280}, "weight_map": tensors}
    )


def looks(path: str) -> tuple[str, ...]:
    return (
        f"checkpoint verify {path} --json",
        f"checkpoint show {path}",
        f"checkpoint ls {path}",
        f"checkpoint convert {path} {{out}}/x --to dcp --no-verify",
        f"checkpoint convert {path} {{out}}/x.pt --no-verify",
        f"checkpoint convert {path} {{out}}/x --to safetensors --tensors-only --no-verify",
        f"checkpoint diff {path} {path} --json",
        f"load {path}",
        f"load {path}",
    )


def load(path: str) -> None:
    """Load a checkpoint into a state, or any tensors of it."""
    target = {"w": torch.zeros(6, 10)} if "safetensors" in path else state()
    pc.load(target, path, strict=False)


def restore(path: str) -> None:
    with pc.Manager(path) as manager:
        manager.restore(state())


# What runs leave behind.


def results(folder: Path) -> None:
    record_training(folder, TrainingStory()).rename(folder / "training")
    record_checkpoints(folder, CheckpointStory()).rename(folder / "checkpoint")
    for page in folder.rglob("*.html"):
        page.unlink()


def numbered_tree(folder: Path) -> None:
    valid_submission(5).write(folder)


def cluster_facts(folder: Path) -> None:
    facts = cluster(present("a"), present("b", memory_bytes=1 << 30))
    (folder / "cluster.json").write_text(facts.model_dump_json(indent=1))


def workload(folder: Path) -> None:
    sections: dict[str, Any] = {
        "framework": "pytorch",
        "model": {"name": "mine", "type": "cnn", "model_size_bytes": 499153191},
        "workflow": {"train": True, "checkpoint": True},
        "dataset": {
            "data_folder": "data/mine/",
            "format": "npz",
            "num_files_train": 168,
            "num_samples_per_file": 1,
            "record_length_bytes": 146600628,
            "record_length_bytes_stdev": 68341808,
            "compression": "gzip",
        },
        "reader": {"data_loader": "pytorch", "batch_size": 7, "read_threads": 4, "file_shuffle": "seed"},
        "train": {"epochs": 5, "computation_time": {"mean": 0.3, "stdev": 0.1, "type": "normal"}},
        "checkpoint": {"checkpoint_folder": "checkpoints/x", "checkpoint_after_epoch": 5},
        "metric": {"au": 0.9},
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(sections))


def hosts(folder: Path) -> None:
    (folder / "hosts").write_text("# mine\nnode1:4\nnode2:4\n[fe80::1]:4 # far\nnode3 slots=4\n")


def read_hosts(path: str) -> None:
    counts, where = find_hosts(None, path)
    place_ranks(counts, 3, where=where)


# Key-value caches.


def requests(folder: Path) -> None:
    write_json(
        folder / "mooncake.jsonl",
        *(
            {"timestamp": n * 10, "input_length": 1500, "output_length": 40, "hash_ids": [0, n, n + 1]}
            for n in range(9)
        ),
    )
    rows = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
    rows += [f"{n},ChatGPT,{600 + n},18,{618 + n},Conversation log" for n in range(9)]
    (folder / "burst.csv").write_text("\n".join(rows))
    turns = [{"from": who, "value": "x" * size} for who, size in (("human", 68), ("gpt", 80), ("human", 4))]
    write_json(folder / "talk.json", [{"id": "x", "conversations": turns}])
    replay = {"trace_block_size": 16, "input_length": 40, "input_sequence_hashes": [1, 2, 3]}
    record = {"request_received_ms": 5, "output_tokens": 5, "replay": replay}
    write_json(folder / "dynamo.jsonl", {"schema": "dynamo.request.trace.v1", "request": record})
    turn = {"t": 1.5, "in": 100, "out": 5, "hash_ids": [1, 2]}
    write_json(folder / "weka.jsonl", {"block_size": 64, "requests": [turn, {"t": 2, "requests": [turn]}]})


def store(folder: Path) -> None:
    config = {
        "model_name": "meta-llama/Llama-3.1-8B", "tokens_per_hash": 16, "blocks_per_file": 2, "tp_size": 1,
        "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "dtype": "torch.bfloat16", "inference_engine": "vllm",
        "kv_cache_groups": [{"tokens_per_block": 16, "layer_names": ["model.layers.0.self_attn.attn"]}],
    }  # fmt: skip
    base = folder / vllm_folder(config)
    write_json(base / "config.json", config)
    for number in range(3):
        name = f"{number:064x}"
        path = Path(f"{base}_r0") / name[:3] / f"{name[3:5]}_g0" / f"{name}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number + 1]) * 4096)
    (folder / "meta-llama@1@0@3beef@half@tenant%a.data").write_bytes(
        b"".join(n.to_bytes(4, "little") for n in (4000, 1, 1, 2, 1, 1, 1000)) + bytes(4000)
    )


def model_config(folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32,
        "head_dim": 128, "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
    }  # fmt: skip
    write_json(folder / "config.json", config)


SUBMISSIONS: Final = tuple(f"submission {verb} {{}} --json" for verb in ("check", "report", "status"))
CACHES: Final = tuple(
    f"kvcache {verb} {{}}/{name} --json"
    for name in ("mooncake.jsonl", "burst.csv", "talk.json", "dynamo.jsonl", "weka.jsonl")
    for verb in ("simulate", "size")
)

READERS: Final = (
    Reader("dftracer", dftracer, QUESTIONS),
    Reader("chrome", chrome, QUESTIONS),
    Reader("strace", strace, QUESTIONS),
    Reader("darshan text", lambda folder: write_dxt(folder / "dxt.txt", seed=1, has_threads=True), QUESTIONS),
    Reader("darshan log", darshan_log, QUESTIONS),
    Reader("event table", event_table, tuple(way.replace("{}", "{}/run.events") for way in QUESTIONS)),
    Reader(
        "comparison", comparison, ("trace compare {}/runs.yaml --json", "trace expect {}/runs.yaml --json")
    ),
    Reader("checkpoint", ours, (*looks("{}/run/step-2"), "checkpoint ls {}/run", "restore {}/run")),
    Reader("stock checkpoint", stock, (*looks("{}/run/step-2"), "restore {}/run")),
    Reader("torch.save", torch_file, looks("{}/model.pt")),
    Reader("safetensors", safetensors, (*looks("{}/model.safetensors"), *looks("{}"))),
    Reader(
        "results",
        results,
        (
            "results ls {} --json",
            "results compare {}/training {}/checkpoint --json",
            "results show {}/training",
            "results show {}/checkpoint --json",
            "results page {}/training -o {out}/x.html",
            "results page {}/checkpoint -o {out}/x.html",
        ),
    ),
    Reader("submission v1.0", numbered_tree, SUBMISSIONS),
    Reader("submission v2.0", lambda folder: valid_round("v2.0").write(folder), SUBMISSIONS),
    Reader("submission v3.0", lambda folder: valid_round("v3.0").write(folder), SUBMISSIONS),
    Reader("cluster facts", cluster_facts, ("cluster check {}/cluster.json --json",)),
    Reader(
        "workload",
        workload,
        (
            "workloads {}/mine.yaml",
            "training size {}/mine.yaml --accelerators 4 --hosts 2 --host-memory 64GiB",
            "training whatif {}/mine.yaml --bandwidth 1GB/s",
        ),
    ),
    Reader("hosts", hosts, ("hosts {}/hosts",)),
    Reader("requests", requests, CACHES),
    Reader("cache store", store, ("kvcache inspect {} --json", "kvcache inspect {} --verify")),
    Reader("model", model_config, ("kvcache size --model {}/config.json --users 3",)),
)
LIBRARY: Final[dict[str, Callable[[str], None]]] = {"load": load, "restore": restore, "hosts": read_hosts}
"""Ways that are no command line."""
