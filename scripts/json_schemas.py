"""The JSON Schemas in docs/schemas: this program makes them anew from what commands print.

A key that every document has is required, one that some have is optional, others may be added at any time:
only a key that goes away, or changes its meaning, makes a new version (`SCHEMA_VERSIONS` of cli/terminal.py).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "schemas"
SMALL = "--set dataset.num_files_train=28 --set dataset.record_length_bytes=64KiB"
SMALL += " --set dataset.record_length_bytes_stdev=0 --set train.epochs=1"
SAVED = """
import torch, penstock.checkpoint as pc
with pc.Manager("ckpt") as manager:
    manager.save(1, {"weights": torch.ones(8)})
"""
COMMANDS = f"""
docs
docs glossary
doctor
workloads
workloads unet3d_h100
training size unet3d --accelerator h100 --accelerators 8 --host-memory 512GiB
training whatif unet3d --accelerator h100 --bandwidth 40GiB/s
training plan unet3d_h100 {SMALL} --ranks 2 --rank 1
training generate unet3d_h100 {SMALL} --data data
training verify unet3d_h100 {SMALL} --data data
training run unet3d_h100 {SMALL} --data data --results runs --trace traces
training run unet3d_h100 {SMALL} --data data --results runs
storage probe data --size 1MiB --streams 1 --blocks 1MiB
storage probe data --size 1MiB --streams 1 --measure knee,metadata --seconds 0.1 --max-seconds 1
storage probe data --size 1MiB --measure knee --mix 0 --rates 1000000 --seconds 0.1 --max-seconds 1
checkpoint models
checkpoint size llama3-8b --ranks 8
checkpoint run llama3-8b --to saved --results runs --scale 0.0001 --writes 1 --reads 1 --interval 0s
checkpoint plan --state 1TiB --nodes 4 --fast 3GiB/s --slow 4GiB/s --node-mtbf 90d
checkpoint ls ckpt
checkpoint show ckpt/step-1
checkpoint verify ckpt/step-1
checkpoint status ckpt
checkpoint convert ckpt/step-1 one.safetensors
checkpoint diff ckpt/step-1 ckpt/step-1
checkpoint halt ckpt --status
results ls runs
results show RUN
results show llama3
results compare RUNS
results watch RUN --once
cluster collect -o cluster.json
cluster check cluster.json
trace summary traces
trace ops traces
trace files traces
trace classes traces
trace sizes traces
trace ranks traces
trace overlap traces
trace timeline traces
trace load traces -o table.events
trace sql SELECT-1 traces
submission init acme tree
submission rules
submission rules sizing.memory
submission status tree
"""


def gather(folder: Path) -> Iterator[dict[str, Any]]:
    """What the commands print in a folder, one after the other."""
    subprocess.run([sys.executable, "-c", SAVED], cwd=folder, check=True)
    for line in COMMANDS.strip().splitlines():
        words = line.split()
        runs = sorted(path.name for path in folder.glob("runs/unet3d*"))
        named = {"RUN": runs[:1], "RUNS": runs}
        words = [name for word in words for name in named.get(word, [word])]
        words = ["SELECT 1 AS one" if word == "SELECT-1" else word for word in words]
        command = [sys.executable, "-m", "penstock", *words, "--json"]
        result = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        if result.returncode not in (0, 3):
            raise RuntimeError(f"{line}: {result.stderr}")
        yield json.loads(result.stdout)


_FIELD = re.compile(r"[a-z]\w*")
"""What a field is called. Other keys are data: paths, names of hosts, topics."""


def infer(values: list[Any]) -> dict[str, Any]:
    """A schema that all of the values fit."""
    kinds = sorted({_kind(value) for value in values})
    schema: dict[str, Any] = {"type": kinds[0] if len(kinds) == 1 else kinds}
    objects = [value for value in values if isinstance(value, dict)]
    if objects:
        shared = set.intersection(*(set(value) for value in objects))
        names = sorted(set().union(*objects))
        if not all(_FIELD.fullmatch(name) for name in names):
            schema["additionalProperties"] = infer([item for value in objects for item in value.values()])
        elif shared:
            schema["properties"] = {
                name: infer([value[name] for value in objects if name in value]) for name in names
            }
            schema["required"] = sorted(shared)
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        schema["items"] = infer(items)
    return schema


def _kind(value: object) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def main() -> None:
    """Write one schema for each document that commands name."""
    with TemporaryDirectory() as folder:
        documents = list(gather(Path(folder)))
    by_name: dict[str, list[Any]] = {}
    for document in documents:
        if "schema" in document:
            by_name.setdefault(document["schema"], []).append(document)
    FOLDER.mkdir(exist_ok=True)
    for name, found in sorted(by_name.items()):
        verb, _, version = name.partition("/")
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": f"penstock {verb.replace('-', ' ', 1)} --json, version {version}",
            **infer(found),
        }
        schema["properties"]["schema"] = {"const": name}
        path = FOLDER / f"{verb}-{version}.json"
        path.write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
    print(f"{len(by_name)} schemas in {FOLDER}")


if __name__ == "__main__":
    main()
