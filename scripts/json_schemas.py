"""Infer the JSON Schemas of `--json` documents from what the commands print, for the site and the wheel.

A key that every document has is required, one that some have is optional. Keys may be added at any time; one
that goes away or changes its meaning makes a new version (`SCHEMA_VERSIONS` in cli/terminal.py).
`tests/golden/cli/json_keys.txt` lists the keys; `--keys` writes it again.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.cli.app import main

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "schemas"
KEYS = ROOT / "tests" / "golden" / "cli" / "json_keys.txt"
SMALL = "--set dataset.num_files_train=28 --set dataset.record_length_bytes=64KiB"
SMALL += " --set dataset.record_length_bytes_stdev=0 --set train.epochs=1"
PREPARE = """
import json, sys
from pathlib import Path
import torch, penstock.checkpoint as pc
from tests.support.submission.numbered_tree import valid_submission
state = {"weights": torch.ones(8)}
with pc.Manager("ckpt") as manager:
    manager.save(1, state)
    manager.save(2, state)
with pc.Manager("durable", cache="cache") as manager:
    manager.save(1, state)
requests = [
    {"timestamp": 0, "input_length": 1200, "output_length": 30, "hash_ids": [1, 2, 3]},
    {"timestamp": 100, "input_length": 1500, "output_length": 20, "hash_ids": [1, 2, 4]},
]
Path("requests.jsonl").write_text("".join(json.dumps(request) + "\\n" for request in requests))
Path("runs.yaml").write_text("{runs: {base: traces, other: traces}, checks: [base.num_dropped == 0]}")
valid_submission().write(Path("round"))
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
training run --loader my_batches:make --batch-time 1ms --results own
storage probe data --size 1MiB --streams 1 --blocks 1MiB
storage probe data --size 1MiB --streams 1 --measure knee,metadata
storage probe data --size 1MiB --measure knee --mix 0 --rates 1000000
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
checkpoint rm ckpt/step-1
checkpoint flush cache
kvcache models
kvcache size --model llama3.1-8b --users 4
kvcache size requests.jsonl --users 4
kvcache simulate requests.jsonl --blocks 1,2
kvcache run --to kv --requests 8 --scale 1/1000 --results kvruns --keep
kvcache replay requests.jsonl --to kv2 --scale 1/1000 --results kvruns
kvcache compare KVRUNS
kvcache run --to kv3 --requests 8 --scale 1/1000 --objective 10s --speedup 1000 --results searched
kvcache run mlperf-v3 --to kv4 --scale 1/1000 --duration 1s --options 1 --trials 1 --results tool
kvcache inspect kv
checkpoint halt ckpt --status
results ls runs
results show RUN
results show llama3
results compare RUNS
results watch RUN --once
results page RUN
results rm RUN --yes
training sweep unet3d_h100 {SMALL} --data data --results sweep --most 1
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
trace file img_10_of_28.npz traces
trace report traces -o report.html
trace compare runs.yaml
trace expect runs.yaml
trace export traces -o exported.json
trace load traces -o table.events
trace sql SELECT-1 traces
submission init acme tree
submission rules
submission rules sizing.memory
submission status tree
submission describe --submission tree --system fast --closed --cluster cluster.json
submission check round
submission report round
"""


def gather(folder: Path) -> Iterator[dict[str, Any]]:
    """What the commands print in a folder, one after the other, in this process: it has imported them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", PREPARE], cwd=folder, check=True, env=environment)
    (folder / "my_batches.py").write_text("def make(): return [[1, 2]] * 8\n", encoding="utf-8")
    for line in COMMANDS.strip().splitlines():
        runs, kvruns = (sorted(map(str, folder.glob(names))) for names in ("runs/unet3d*", "kvruns/kv*"))
        named = {"RUN": [Path(run).name for run in runs[:1]], "RUNS": runs, "KVRUNS": kvruns}
        named["SELECT-1"] = ["SELECT 1 AS one"]
        words = [name for word in line.split() for name in named.get(word, [word])]
        said, noted = StringIO(), StringIO()
        with chdir(folder), redirect_stdout(said), redirect_stderr(noted):
            exit_code = main([*words, "--json"])
        if exit_code not in (0, 1, 3) or not said.getvalue():
            raise RuntimeError(f"{line}: {noted.getvalue()}")
        yield json.loads(said.getvalue())


_FIELD = re.compile(r"[a-z]\w*")
"""What a field is called. Other keys are data: paths, names of hosts, topics."""


_MAY_BE_NULL = {"knee"}
"""Fields that a quiet machine has and a busy one may not."""


def infer(values: list[Any]) -> dict[str, Any]:
    """A schema that all of the values fit."""
    kinds = sorted({_kind(value) for value in values})
    schema: dict[str, Any] = {"type": kinds[0] if len(kinds) == 1 else kinds}
    objects = [value for value in values if isinstance(value, dict)]
    if objects:
        always = set.intersection(*(set(value) for value in objects))
        # An empty object says nothing about the keys of those that are not.
        shared = set.intersection(*(set(value) for value in objects if value)) if any(objects) else always
        names = sorted(set().union(*objects))
        if not all(_FIELD.fullmatch(name) for name in names):
            schema["additionalProperties"] = infer([item for value in objects for item in value.values()])
        elif shared:
            schema["properties"] = {
                name: infer(
                    [
                        *(value[name] for value in objects if name in value),
                        *([None] if name in _MAY_BE_NULL else []),
                    ]
                )
                for name in names
            }
            if always:
                schema["required"] = sorted(always)
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        schema["items"] = infer(items)
    return schema


def _kind(value: object) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def schemas_of(documents: list[Any]) -> dict[str, dict[str, Any]]:
    """A schema for each kind of document, by its name and version, as in `checkpoint-ls/1`."""
    by_name: dict[str, list[Any]] = {}
    for document in documents:
        if "schema" in document:
            by_name.setdefault(document["schema"], []).append(document)
    return {
        name: {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": f"penstock {name.partition('/')[0].replace('-', ' ', 1)} --json, version {name[-1]}",
            **infer(found),
        }
        for name, found in sorted(by_name.items())
    }


def keys_of(schema: dict[str, Any]) -> Iterator[str]:
    """The keys of a document and of the objects in it, `?` after those that may be missing."""
    for name, value in schema.get("properties", {}).items():
        yield name + "?" * (name not in schema.get("required", ()))
        for suffix, inner in (("", value), ("[]", value.get("items", {}))):
            for key in inner.get("properties", {}):
                yield f"{name}{suffix}.{key}" + "?" * (key not in inner.get("required", ()))


def main_program() -> None:
    """Write the schemas, or with `--keys` the golden list of keys."""
    with TemporaryDirectory() as folder:
        schemas = schemas_of(list(gather(Path(folder))))
    if "--keys" in sys.argv[1:]:
        lines = (f"{name}: {' '.join(keys_of(schema))}\n" for name, schema in schemas.items())
        KEYS.write_text("".join(lines), encoding="utf-8")
        return
    FOLDER.mkdir(exist_ok=True)
    for name, schema in schemas.items():
        schema["properties"]["schema"] = {"const": name}
        path = FOLDER / f"{name.replace('/', '-')}.json"
        path.write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
    print(f"{len(schemas)} schemas in {FOLDER}")


if __name__ == "__main__":
    main_program()
