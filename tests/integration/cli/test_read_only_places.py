"""Commands that are told to write where everything is mounted read-only say that, whatever they write."""

import json
from pathlib import Path

import pytest
from tests.support.mounted import run_mounted

COMMANDS = {
    "probe": ["storage", "probe", "{place}", "--size", "1MiB"],
    "generate": ["training", "generate", "unet3d_h100", "--data", "{place}"],
    "cache": ["kvcache", "run", "--to", "{place}", "--results", "{place}", "--requests", "20"],
    "page": ["kvcache", "simulate", "{place}/trace.jsonl", "--page", "{place}/page.html"],
    "checkpoints": ["checkpoint", "run", "llama3-8b", "--to", "{place}", "--results", "{place}"],
    "demo": ["demo", "--out", "{place}/new"],
    "collect": ["cluster", "collect", "-o", "{place}/cluster.json"],
    "record": ["trace", "record", "--tracer", "strace", "-o", "{place}/new", "--", "true"],
    "export": ["trace", "export", "{place}/trace.pfw", "-o", "{place}/new.json"],
    "compare": ["trace", "compare", "{place}/trace.pfw", "-o", "{place}/new"],
    "table": ["trace", "load", "{place}/trace.pfw", "-o", "{place}/new"],
    "findings": ["submission", "check", "{place}", "--csv", "{place}/new.csv"],
    "tree": ["submission", "init", "acme", "{place}/new"],
    "rehearsal": ["submission", "rehearse", "unet3d", "{place}/new"],
    "halt": ["checkpoint", "halt", "{place}"],
    "gate": ["cluster", "check", "--results", "{place}/new"],
}
PROGRAM = """
import sys
sys.stderr = sys.stdout
from penstock.cli.app import main
code = main([word.replace("{place}", sys.argv[1]) for word in WORDS])
assert code, code
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_what_cannot_be_written_on_a_read_only_mount_says_so(name: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 9, "hash_ids": [1]}')
    program = PROGRAM.replace("WORDS", json.dumps(COMMANDS[name]))
    assert "is mounted read-only" in run_mounted(tmp_path, program)
