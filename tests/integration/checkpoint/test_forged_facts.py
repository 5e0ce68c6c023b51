"""Forged descriptions: facts that are not as Penstock writes them, and files that would fill the memory."""

import json
import os
from pathlib import Path

import pytest

from penstock.checkpoint.formats.description import OPENING, checksum_of
from penstock.checkpoint.tools.verify import verify
from penstock.errors import DataDamaged

torch = pytest.importorskip("torch")
pc = pytest.importorskip("penstock.checkpoint")


@pytest.mark.parametrize("fact", ["key_types", "own_entries"])
@pytest.mark.parametrize("text", ["no JSON", "[1]", "[" * 100_000])
def test_facts_that_cannot_be_read_are_damage(tmp_path: Path, fact: str, text: str) -> None:
    pc.save({"x": torch.ones(2)}, tmp_path / "saved")
    path = tmp_path / "saved" / "penstock.json"
    document = json.loads(path.read_bytes())
    del document["format"], document["xxh3_128"]
    document["facts"][fact] = text
    rest = b'",' + json.dumps(document, separators=(",", ":"))[1:].encode() + b"\n"
    path.write_bytes(OPENING + checksum_of(OPENING, rest).hex().encode() + rest)
    with pytest.raises(DataDamaged, match=r"The facts in penstock\.json cannot be read"):
        pc.load({"x": torch.ones(2)}, tmp_path / "saved")


@pytest.mark.parametrize("name", [".metadata", "penstock.json", "model.safetensors.index.json"])
def test_descriptions_of_terabytes_are_refused_unread(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "saved"
    if "safetensors" in name:
        folder.mkdir()
        (folder / name).touch()
    else:
        pc.save({"x": torch.ones(2)}, folder)
    os.truncate(folder / name, 1 << 42)
    with pytest.raises(DataDamaged, match=r"bytes, more than the [0-9,]+ that are read at once"):
        pc.load({"x": torch.ones(2)}, folder)
    (damage,) = verify(folder).damage
    assert "that are read at once" in damage.what
