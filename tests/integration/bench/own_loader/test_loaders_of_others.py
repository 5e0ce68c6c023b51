"""Loaders of other libraries run unmodified; each test is skipped where its library is not installed."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.command_line import run_command

pytest.importorskip("torch")

LOADERS = """
import os
import numpy as np

def files(count=16):
    os.makedirs("arrays", exist_ok=True)
    names = [f"arrays/{number:02}.npy" for number in range(count)]
    for name in names:
        np.save(name, np.zeros((8, 8), np.uint8))
    return names

def webdataset():
    import webdataset as wds
    with wds.TarWriter("shard.tar") as tar:
        for number, name in enumerate(files()):
            tar.write({"__key__": f"{number:04}", "npy": np.load(name)})
    samples = wds.WebDataset(["shard.tar"], shardshuffle=False).decode().to_tuple("npy").batched(4)
    return wds.WebLoader(samples, batch_size=None, num_workers=1)

def streaming():
    import streaming, torch
    with streaming.MDSWriter(out="mds", columns={"x": "ndarray"}) as writer:
        for name in files():
            writer.write({"x": np.load(name)})
    samples = streaming.StreamingDataset(local="mds", batch_size=4, shuffle=False)
    return torch.utils.data.DataLoader(samples, batch_size=4, num_workers=1)

def litdata():
    import litdata, torch
    from litdata.streaming.writer import BinaryWriter
    os.makedirs("lit")
    writer = BinaryWriter("lit", chunk_size=8)
    for number, name in enumerate(files()):
        writer[number] = torch.from_numpy(np.load(name))
    writer.done()
    writer.merge()
    return litdata.StreamingDataLoader(litdata.StreamingDataset("lit"), batch_size=4, num_workers=1)

def grain():
    import grain.python as grain
    class Arrays:
        names = files()
        def __len__(self):
            return len(self.names)
        def __getitem__(self, index):
            return np.load(self.names[index])
    order = grain.SequentialSampler(16, grain.NoSharding())
    return grain.DataLoader(data_source=Arrays(), sampler=order, operations=[grain.Batch(4)], worker_count=0)

def spdl():
    from spdl.pipeline import PipelineBuilder
    pipeline = PipelineBuilder().add_source(files()).pipe(np.load, concurrency=2).aggregate(4).pipe(np.stack)
    with (built := pipeline.add_sink(2).build(num_threads=2)).auto_stop():
        yield from built.get_iterator(timeout=30)

def datasets():
    import datasets, torch
    def load(rows):
        return {"x": [torch.from_numpy(np.load(name)) for name in rows["name"]]}
    samples = datasets.Dataset.from_dict({"name": files()}).with_transform(load)
    return torch.utils.data.DataLoader(samples, batch_size=4, num_workers=1)

def tensorflow():
    import tensorflow as tf
    def load(name):
        return tf.reshape(tf.io.decode_raw(tf.io.read_file(name), tf.uint8)[-64:], (8, 8))
    return tf.data.Dataset.from_tensor_slices(files()).map(load, num_parallel_calls=2).batch(4).prefetch(2)
"""
LIBRARIES = ("webdataset", "streaming", "litdata", "grain", "spdl", "datasets", "tensorflow")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "loaders_of_others.py").write_text(LOADERS)
    yield tmp_path
    sys.modules.pop("loaders_of_others", None)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_loader_of_another_library_is_measured_as_it_is(library: str) -> None:
    pytest.importorskip(library, exc_type=ImportError)
    words = ("--loader", f"loaders_of_others:{library}", "--batch-time", "1ms", "--results", "runs", "--json")
    result = run_command("training", "run", *words, "--set", "metric.au=0")
    assert result.returncode == 0, result.stderr
    waits = json.loads(result.stdout)["outside_of_score"]["waits"]
    assert (waits["batches"], waits["samples"]) == (4, 16)
    assert sum(waits["stages"].values()) == pytest.approx(waits["wait_s"], rel=1e-6)
