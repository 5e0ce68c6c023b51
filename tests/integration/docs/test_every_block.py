"""Every block of the README and of docs/ runs as a reader would type it, and its figures are sensible.

`make examples` runs them and prints how many. A block of a page continues where the one above it stopped: all
blocks of a page share a folder, and their Python shares its names.
"""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.doc_blocks import ROOT, Block, Case, find_blocks
from tests.support.s3.server import BUCKET, S3Server

pytestmark = [
    pytest.mark.examples,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

PROBED = {
    r"^ .* MiB +([\d.]+) +(?:-|\d+%) +[\d,]+ ": 0,
    r"^ .* KiB +[\d.]+ +(?:-|\d+%) +([\d,]+) ": 0,
}
TRAINED = {
    r"^  AU +([\d.]+) % by DLIO's formula": 20.0,
    r"by DLIO's formula, ([\d.]+) % strictly": 20.0,
    r"harness +AU ([\d.]+) %": 50.0,
    r"([\d.]+) samples/s$": 0,
}
GPU_FRAMEWORK = (
    "needs a framework for GPUs, which pip does not bring everywhere; where it is installed, "
    "tests/integration/checkpoint/adapters/test_{}_adapter.py runs these calls"
)
LIGHTNING = """
import functools, lightning, torch
from penstock.checkpoint.adapters.lightning import PenstockIO

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4)
quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
first = lightning.Trainer(max_epochs=2, plugins=[PenstockIO()], enable_checkpointing=False, **quiet)
first.fit(Model(), loader)
first.save_checkpoint("checkpoints/epoch=1-step=8.ckpt")
Trainer, model = functools.partial(lightning.Trainer, max_epochs=3, default_root_dir="logs", **quiet), Model()
"""
HUGGING_FACE = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
model = BertForSequenceClassification(BertConfig(vocab_size=16, **sizes))
samples = [{"input_ids": torch.arange(4), "labels": torch.tensor(1)} for _ in range(8)]
args = TrainingArguments("trained", max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
"""
ACCELERATE = """
import accelerate, torch
import penstock.checkpoint as pc

accelerator, manager = accelerate.Accelerator(cpu=True), pc.Manager("accelerated")
model = accelerator.prepare(torch.nn.Linear(2, 2))
"""

CASES = (
    Case(page="README.md", key="penstock doctor", shows=(r"\b0 missing$",)),
    Case(page="README.md", key="probe ./data --size 64MiB", figures=PROBED),
    Case(
        page="README.md",
        key="--streams 1,16 --ranks 4",
        replace={"> limits.json": "| tee limits.json"},
        figures={r'"gib_per_s": ([\d.]+)': 0},
    ),
    Case(
        page="README.md",
        key="s3://my-bucket/a",
        replace={"s3://my-bucket/": f"s3://{BUCKET}/"},
        figures=PROBED,
    ),
    Case(
        page="README.md",
        key="penstock training whatif",
        shows=(r"^unet3d$", r"at least +37,501 files"),
        figures={r"feeds (\d+) accelerators": 1},
    ),
    Case(page="README.md", key='words="unet3d', shows=(r"8 written", r": 0 wrong\.$")),
    Case(
        page="README.md",
        key="training run unet3d",
        figures=TRAINED,
        shows=(r"^  limit +\w", r"AU \d\d\.\d\d % \(strict \d\d\.\d\d %\)"),
    ),
    Case(
        page="README.md",
        key="class Volumes(Dataset)",
        shows=(r"^Waiting [\d.]+% of the time",),
        figures={r"^  AU +([\d.]+) % by DLIO's formula": 1, r"^  a sample +([\d.]+) MiB": 0.9},
    ),
    Case(
        page="README.md",
        key="checkpoint run llama3-8b",
        shows=(r"in 128 files", "^Bottleneck: "),
        figures={r"^ (?:write|read) .*? m?s +([\d.]+) ": 0},
    ),
    Case(
        page="README.md",
        key="penstock kvcache size",
        shows=("= 175 GiB$",),
        figures={r"^ write +([\d,]+)": 1000, r"^Requests with hits: (\d+)": 10},
    ),
    Case(page="README.md", key="manager.save_async(7, state)"),
    Case(
        page="README.md",
        key="checkpoint ls ./checkpoints",
        shows=(r"^ step-7 +7 +committed", r"model\.weight +float32 +256 x 256", r"step-7: whole; 3 items"),
    ),
    Case(
        page="README.md",
        key="trace load ./traces",
        figures={r"^ events +([\d,]+)": 100, r"pwrite +([\d,]+)": 10},
    ),
    Case(
        page="README.md",
        key="penstock-dlio workload=",
        shows=("train_au_meet_expectation: success",),
        figures={
            r"Training Accelerator Utilization \[AU\] \(%\): ([\d.]+)": 20,
            r"Training Throughput.*: ([\d.]+) ": 0,
        },
    ),
    Case(page="README.md", key="submission init acme", shows=("now belongs to acme", "id: sizing.memory")),
    Case(page="README.md", key="write_object(storage", shows=(r"\('greeting', 14\)",)),
    Case(
        page="docs/checkpoint-adapters.md", key="adapters.lightning import AsyncPenstockIO", before=LIGHTNING
    ),
    Case(
        page="docs/checkpoint-adapters.md",
        key="adapters.megatron import",
        named=GPU_FRAMEWORK.format("megatron"),
    ),
    Case(
        page="docs/checkpoint-adapters.md",
        key="adapters.hugging_face import PenstockCheckpoints",
        replace={"/pfs/run": "pfs/run"},
        before=HUGGING_FACE,
    ),
    Case(page="docs/checkpoint-adapters.md", key="import load_state, save_state", before=ACCELERATE),
    Case(
        page="docs/checkpoint-adapters.md",
        key="adapters.torchtitan import",
        named=GPU_FRAMEWORK.format("torchtitan"),
    ),
    Case(
        page="docs/checkpoint-adapters.md",
        key="adapters.resiliency import",
        named=GPU_FRAMEWORK.format("resiliency"),
    ),
    Case(
        page="docs/checkpoint.md",
        key="fully_shard(model)",
        elsewhere="test_checkpoint_page.py::test_its_first_example_is_killed_and_goes_on_with_the_same_losses",
    ),
    Case(
        page="docs/checkpoint.md",
        key='pc.save(state, "run/step-100")',
        shows=("'model.weight', 'model.bias', 'step'",),
    ),
    Case(page="docs/checkpoint.md", key="dcp.save(weights"),
    Case(
        page="docs/checkpoint.md",
        key="pc.dry_run(state)",
        shows=("1.00 MiB in tensors, on 1 rank", r"rank 0 writes \[:, :\], 1 MiB"),
    ),
    Case(page="docs/checkpoint.md", key='rename={"net.*": "model.*"}'),
    Case(
        page="docs/checkpointing.md",
        key="--to ./ckpt",
        shows=("in 128 files",),
        figures={r"^ write .*? m?s +([\d.]+) ": 0},
    ),
    Case(page="docs/checkpointing.md", key="tee result.json", figures={r'"gib_per_s": ([\d.]+)': 0}),
    Case(page="docs/cluster.md", key="cluster collect", shows=("1 of 1 hosts, complete", r"^pass +memory")),
    Case(page="docs/cluster.md", key="--gate clock", shows=("^pass clock", r"^pass space .*free at")),
    Case(
        page="docs/levels.md",
        key="flush=pc.Flush(every=10",
        replace={
            "/pfs/run": "pfs/run",
            "/local/ssd/run": "ssd/run",
            # One host can protect nothing against its own loss, and steps that take no time are never due.
            "pc.Xor(group=8)": "pc.Single()",
            "pc.Daly(mtbf_s=6 * 3600)": "pc.EverySteps(1)",
        },
        before="import torch\nstate, steps, rank = {'weights': torch.ones(1 << 16), 'epoch': 1}, 12, 0\n"
        "train = lambda state: None\nall_is_well = is_plausible = lambda state: True\n",
    ),
    Case(
        page="docs/levels.md",
        key="with manager.output(",
        before="import penstock.checkpoint as pc\nstep, manager = 40, pc.Manager('pfs/own')\n",
    ),
    Case(page="docs/levels.md", key="with manager.restart()"),
    Case(
        page="docs/levels.md",
        key="--watch",
        replace={"/pfs/run": "pfs/run", "/local/ssd/run": "ssd/run"},
        shows=(r"^ +\d+ +",),
    ),
    Case(
        page="docs/levels.md",
        key="checkpoint rm /local",
        replace={"srun --ntasks-per-node=1 ": "", "/local/ssd/run": "ssd/run", "step-100": "step-12"},
    ),
    Case(
        page="docs/levels.md",
        key='time_limit="slurm"',
        replace={"/pfs/run": "pfs/run", '"slurm"': "3600"},
        before="train, steps = lambda state: None, 20\n",
    ),
    Case(page="docs/levels.md", key="checkpoint halt", replace={"/pfs/run": "pfs/run"}),
    Case(page="docs/levels.md", key="--node-mtbf 200d", figures={r"^ (?:durable|cache).*?([\d.]+)% ": 10}),
    Case(page="docs/scale.md", key="num_files_train=50136788", figures={r"([\d,]+)\.\d samples/s": 1000}),
    Case(
        page="docs/start-hpc-engineer.md",
        key="storage probe ./data",
        figures=PROBED,
        shows=(r"^pass +memory",),
    ),
    Case(
        page="docs/start-hpc-engineer.md",
        key="trace record",
        figures={r"^ events +([\d,]+)": 3},
        shows=("data.bin",),
    ),
    Case(page="docs/start-hpc-engineer.md", key="training run", figures=TRAINED, shows=(r"AU \d\d\.\d\d %",)),
    Case(page="docs/start-ml-engineer.md", key="storage_writer=pc.Writer"),
    Case(page="docs/start-ml-engineer.md", key="manager.save_async", shows=("^at step 10$",)),
    Case(
        page="docs/start-ml-engineer.md",
        key="checkpoint verify run/checkpoints",
        shows=(r"step-5 .*committed", r"step-10: whole; \d+ items"),
    ),
    Case(
        page="docs/start-storage-vendor.md",
        key="training whatif",
        shows=(r"at least +[\d,]+ files", "one checkpoint: "),
        figures={r"feeds (\d+) accelerators": 1},
    ),
    Case(
        page="docs/storage.md",
        key="def open_pfs",
        elsewhere="tests/integration/storage/test_third_party_file_system.py",
    ),
    Case(
        page="docs/storage.md",
        key="--measure knee",
        shows=(r"^The knee: .* Limited by ", r"^ delete +direct"),
        figures={r"^The knee: ([\d,]+) random 64 KiB operations": 10, r"^ create +direct +1 +([\d,]+)": 100},
    ),
    Case(
        page="docs/trace.md",
        key="trace summary study/base",
        replace={
            "penstock trace summary study/base": f"PYTHONPATH={ROOT} python -c 'from pathlib import Path; "
            "from tests.support.synthesize import read_description, synthesize; "
            'synthesize(read_description("seven_runs"), Path("study"))'
            "'; penstock trace summary study/base"
        },
        shows=(r"1060\.072770",),
        leaves=("report/report.html", "two.html", "base.json.gz"),
        figures={r"^ events +([\d,]+)": 10},
    ),
    Case(page="docs/trace.md", key="penstock.trace.load(", shows=("model.pt",)),
    Case(
        page="docs/trace.md",
        key="python train.py        #",
        replace={
            "--data /data/unet3d": "--data none --set dataset.format=synthetic "
            "--set dataset.num_files_train=28 --set train.epochs=1",
            "direct:///mnt/pfs/ckpt": "ckpt --scale 0.0002 --writes 1 --reads 1 --interval 0s",
            "--ranks 8": "--ranks 2",
            "python train.py  ": "python -c 'import penstock.checkpoint as pc; pc.save({1: [2]}, \"c\")'  ",
        },
        figures={r"^  AU +([\d.]+) % by DLIO's formula": 20, r"^ events +([\d,]+)": 50},
    ),
    Case(page="docs/trace.md", key="GROUP BY ALL ORDER BY ALL", shows=("train.wait",)),
    Case(page="docs/trace.md", key="tracing_to(", before="loader, model, save = [1, 2], None, str\n"),
    Case(
        page="docs/trace.md",
        key="--tracer strace",
        replace={
            "python train.py": "python -c pass",
            "cp model.pt /scratch": "cp model.pt copied",
            "penstock trace record -o traces -- ": "echo 1 > model.pt; penstock trace record -o traces -- ",
        },
        figures={r"^ events +([\d,]+)": 3},
    ),
    Case(page="docs/training.md", key="length_bytes_stdev=64KiB", figures=TRAINED),
    Case(page="docs/training.md", key="data none", figures={r"^([\d.]+) \w+": 20}),
    Case(
        page="docs/training.md",
        key="my_data:make_loader",
        shows=(
            r"^Waiting [\d.]+% of the time",
            r"^  tried +workers=4: [\d.]+x",
            r"'storage_s': [\d.]+",
        ),
    ),
    Case(page="docs/training.md", key="measure_loader(", shows=(r"^Waiting [\d.]+% of the time",)),
    Case(
        page="docs/training.md",
        key="--trace traces",
        replace={"data/unet3d": "data/smaller"},
        shows=(r"train\.wait",),
        figures={**TRAINED, r"^ events +([\d,]+)": 50},
    ),
    Case(page="docs/workloads.md", key="size_dataset(request)"),
)


def _case(block: Block) -> Case:
    found = [case for case in CASES if case.fits(block)]
    assert len(found) == 1, f"{len(found)} cases fit {block}: say in CASES how it is run.\n{block.text}"
    return found[0]


@dataclass
class Story:
    """The folder and the names of each page: later blocks look at what earlier ones left, as for a reader."""

    root: Path
    names: dict[str, dict[str, Any]]

    def folder(self, page: str) -> Path:
        """The folder of a page."""
        folder = self.root / Path(page).stem
        folder.mkdir(exist_ok=True)
        return folder


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(tmp_path_factory.mktemp("pages"), {})


def _run_shell(text: str, here: Path, server: S3Server) -> str:
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        # A busy machine may be too slow for the accelerators, which fails the command.
        ["bash", "-euc", text.replace("penstock training run ", "penstock training run --set metric.au=0 ")],
        check=False,
        cwd=here,
        env={**os.environ, **server.environment, "PATH": programs, "COLUMNS": "110"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert ": fail" not in result.stderr, "a gate is closed"
    return result.stdout


@pytest.mark.parametrize("block", find_blocks(), ids=str)
def test_a_block_runs_and_its_figures_are_sensible(
    block: Block,
    story: Story,
    moto: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    case = _case(block)
    record_property("block", "named" if case.named else "run")
    if case.elsewhere:
        assert (ROOT / "tests/integration/docs" / case.elsewhere.partition("::")[0]).exists() or (
            ROOT / case.elsewhere
        ).exists()
    if case.elsewhere or case.named:
        return
    text = block.text
    for shown, stand_in in case.replace.items():
        assert shown in text, f"{block} has no {shown!r}"
        text = text.replace(shown, stand_in)
    here = story.folder(block.page)
    if block.language == "sh":
        case.check(_run_shell(text, here, moto), here)
        return
    monkeypatch.chdir(here)
    printed, known = io.StringIO(), story.names.setdefault(block.page, {})
    with contextlib.redirect_stdout(printed):
        exec(compile(case.before + text, block.page, "exec"), known)
    case.check(printed.getvalue(), here)


def test_every_case_is_for_a_block() -> None:
    blocks = find_blocks()
    assert [case.key for case in CASES if sum(map(case.fits, blocks)) != 1] == []
