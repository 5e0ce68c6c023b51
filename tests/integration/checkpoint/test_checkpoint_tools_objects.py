"""The tools on an object service: the same words, the same verdicts."""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.s3.server import BUCKET

from penstock.cli import main
from penstock.storage import open_storage
from penstock.storage.protocol import read_object, write_object

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.s3.server import S3Server

torch = pytest.importorskip("torch")
library = pytest.importorskip("safetensors.torch")

_corners = itertools.count()


@pytest.fixture
def run(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a run that nobody else has, and the server in this process's environment."""
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/tools-{os.getpid()}-{next(_corners)}/run"


def test_a_checkpoint_goes_to_objects_and_comes_back(
    run: str, moto: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked(*words: str) -> tuple[int, Any]:
        code = main(["checkpoint", *words, "--json"])
        text = capsys.readouterr().out
        return code, json.loads(text) if text else None

    tensors = {"w": torch.arange(5000.0).reshape(50, 100), "b": torch.ones(3, dtype=torch.bfloat16)}
    torch.save({**tensors, "step": 4}, tmp_path / "x.pt")
    for step in (1, 2):
        assert asked("convert", str(tmp_path / "x.pt"), f"{run}/step-{step}")[0] == 0
    _, listing = asked("ls", run)
    assert [(one["name"], one["state"]) for one in listing["checkpoints"]] == [
        ("step-1", "committed"),
        ("step-2", "committed"),
    ]
    code, found = asked("verify", f"{run}/step-1")
    assert (code, found["is_whole"], found["checked_bytes"]) == (0, True, found["size_bytes"])
    assert asked("show", f"{run}/step-1")[1]["tensors"][0]["shape"] == [50, 100]
    assert asked("diff", f"{run}/step-2", str(tmp_path / "x.pt"))[0] == 0

    single = f"{run}/exported.safetensors"
    assert asked("convert", f"{run}/step-1", single, "--tensors-only")[0] == 0
    assert asked("convert", single, str(tmp_path / "back.safetensors"))[0] == 0
    back = library.load_file(tmp_path / "back.safetensors")
    assert torch.equal(back["w"], tensors["w"])
    assert torch.equal(back["b"], tensors["b"])

    storage = open_storage(run, moto.environment)
    (key,) = (info.key for info in storage.list() if "step-2" in info.key and info.key.endswith(".distcp"))
    content = read_object(storage, key)
    content[5000] ^= 1
    write_object(storage, key, [content])
    code, found = asked("verify", f"{run}/step-2")
    assert (code, found["damage"][0]["what"]) == (1, "its checksum differs")

    assert asked("rm", f"{run}/step-1")[0] == 2
    assert asked("rm", f"{run}/step-1", "--no-verify")[1]["stays"] == "step-2"
    assert asked("rm", f"{run}/step-2")[0] == 2
    assert asked("rm", f"{run}/step-2", "--even-last")[0] == 0
    assert [info.key for info in storage.list()] == ["exported.safetensors"]

    # What a removal that was interrupted after it took the name away has left.
    write_object(storage, f"step-2/{'a' * 16}/__0_0.distcp", [b"left"])
    code, found = asked("rm", f"{run}/step-2")
    assert (code, found["num_files"], found["size_bytes"], found["step"]) == (0, 1, 4, 2)
    assert asked("rm", f"{run}/step-2")[0] == 2
    assert [info.key for info in storage.list()] == ["exported.safetensors"]
