"""Loads of one safetensors file beside other loaders of such files, cold and out of the page cache, on CPUs.

    python benchmarks/checkpoint_peers.py [MIB]        by default 1024

Ours is `pc.load` into new tensors. Peers are `load_file` by mmap, whose tensors are cloned, as they keep
nothing of the file in memory; by pread, from safetensors 0.9; run:ai's streamer; fastsafetensors without
GPUDirect. Those that are not installed are left out:

    pip install --no-deps runai-model-streamer fastsafetensors "safetensors>=0.9.0rc1"

Goal: no ratio below 1. Beside each stands the ratio of CPU seconds.
"""

from __future__ import annotations

import inspect
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from checkpoint_engine import alone_in_a_group, cpu_s, folder_for_files
from checkpoint_ranks import TENSOR_BYTES
from harness import Ratio, compare, take_turns
from penstock.checkpoint.api import load
from penstock.storage.residency import evict_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from harness import Side

DEFAULT_MIB = 1024
MIB = 1 << 20

State = dict[str, torch.Tensor]


def measure(repetitions: int, size_mib: int = DEFAULT_MIB) -> list[Ratio]:
    """Ours beside each peer that is installed."""
    with alone_in_a_group(), folder_for_files() as folder:
        path = folder / "model.safetensors"
        state = {f"w{n}": torch.randn(TENSOR_BYTES // 4) for n in range(size_mib * MIB // TENSOR_BYTES)}
        save_file(state, path)
        peers = _peers()
        sides = [
            _side(f"{name}, {heat}", way, path, state)
            for heat in ("cold", "warm")
            for name, way in {"ours": _ours, **peers}.items()
        ]
        seen = take_turns(sides, repetitions=repetitions)
    unit = {"": "GiB/s", " CPU": "GiB a CPU s"}
    return [
        compare(
            seen, f"{heat}{kind}: load / {name}", (f"ours, {heat}{kind}", f"{name}, {heat}{kind}"), unit[kind]
        )
        for heat in ("cold", "warm")
        for kind in unit
        for name in peers
    ]


def _peers() -> dict[str, Callable[[Path], State]]:
    peers: dict[str, Callable[[Path], State]] = {"safetensors by mmap": _by_mmap}
    if "backend" in inspect.signature(load_file).parameters:
        peers["safetensors by pread"] = _by_pread
    if find_spec("runai_model_streamer"):
        peers["run:ai streamer"] = _by_runai
    if find_spec("fastsafetensors"):
        peers["fastsafetensors"] = _by_fastsafetensors
    return peers


def _side(name: str, way: Callable[[Path], State], path: Path, expected: State) -> Side:
    """A side that gives GiB a second and a CPU second, and checks what was loaded off the clock."""
    size_gib = sum(value.nbytes for value in expected.values()) / (1 << 30)

    def side() -> Mapping[str, float]:
        if name.endswith("cold"):
            evict_file(str(path))
        else:
            path.read_bytes()
        begin_cpu_s, start_s = cpu_s(), time.perf_counter()
        found = way(path)
        took_s, took_cpu_s = time.perf_counter() - start_s, cpu_s() - begin_cpu_s
        assert all(torch.equal(found[key], value) for key, value in expected.items()), name
        return {name: size_gib / took_s, f"{name} CPU": size_gib / took_cpu_s}

    side()
    return side


def _ours(path: Path) -> State:
    state = {f"w{n}": torch.empty(TENSOR_BYTES // 4) for n in range(path.stat().st_size // TENSOR_BYTES)}
    load(state, path)
    return state


def _by_mmap(path: Path) -> State:
    return {name: value.clone() for name, value in load_file(path).items()}


def _by_pread(path: Path) -> State:
    options: dict[str, Any] = {"backend": "pread"}
    return load_file(path, **options)


def _by_runai(path: Path) -> State:
    with import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        return dict(streamer.get_tensors())


def _by_fastsafetensors(path: Path) -> State:
    peer = import_module("fastsafetensors")
    with peer.fastsafe_open([str(path)], pg=peer.SingleGroup(), device="cpu", nogds=True) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


if __name__ == "__main__":
    for ratio in measure(5, *(int(argument) for argument in sys.argv[1:])):
        print(ratio.line(None))
