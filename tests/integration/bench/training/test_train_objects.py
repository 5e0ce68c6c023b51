"""Every epoch reads the same from an object service, by the service's own count of requests."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.s3.fake_server import running_fake
from tests.support.s3.server import BUCKET

from penstock.bench.loader.native_loader import NativeOptions
from penstock.bench.training.training_run import TrainingRequest, train
from penstock.cluster.comm import SoloComm
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.generate import generate
from penstock.progress import Progress
from penstock.storage import open_storage
from penstock.workload.enums import DataFormat, Shuffle
from penstock.workload.spec import Dataset, ReaderSection, Train, Workload

if TYPE_CHECKING:
    from penstock.bench.loader.loader_protocol import LoaderOptions

FILES = Dataset(format=DataFormat.NPZ, num_files_train=12, record_length_bytes=Fraction(4000))


def loader(name: str) -> LoaderOptions:
    if name == "native":
        return NativeOptions(threads=2)
    pytest.importorskip("torch")
    from penstock.bench.loader.pytorch_loader import PytorchOptions

    return PytorchOptions(workers=0, sample_bytes=64)


@pytest.mark.parametrize("name", ["native", "pytorch"])
@pytest.mark.parametrize("shuffle", [Shuffle.OFF, Shuffle.SEED])
def test_each_epoch_gets_each_object_once(tmp_path: Path, name: str, shuffle: Shuffle) -> None:
    with running_fake() as server:
        opened = partial(open_storage, f"s3://{BUCKET}/data", server.as_server().environment)
        storage = opened()
        recipe = DatasetRecipe(dataset=FILES, seed=3, reduction=IRREDUCIBLE)
        generate(recipe, storage, comm=SoloComm(), threads=2, progress=Progress())
        gets = []
        for epochs in (1, 3):
            before = server.requests["GetObject"]
            request = TrainingRequest(
                workload=Workload(
                    name="small",
                    dataset=FILES,
                    reader=ReaderSection(batch_size=3, file_shuffle=shuffle),
                    train=Train(epochs=epochs),
                ),
                results=tmp_path / str(epochs),
                seed=5,
                loader=loader(name),
                reopen=opened,
            )
            train(request, storage, comm=SoloComm(), progress=Progress())
            gets.append(server.requests["GetObject"] - before)
    assert gets[1] - gets[0] == 2 * FILES.num_files_train
