"""The programs of examples/ run, stop and continue; job files and containers fit their schemas."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.support.s3.server import BUCKET, S3Server

pytestmark = pytest.mark.examples
EXAMPLES = Path(__file__).parents[3] / "examples"
PROGRAMS = Path(sys.executable).parent
SMALL = "--set dataset.num_files_train=16 --set dataset.record_length_bytes=64KiB"
SMALL += " --set dataset.record_length_bytes_stdev=0"


def run(words: str, here: Path, **environment: str) -> str:
    """What a command line prints, with NAME.py standing for the example."""
    line = re.sub(r"\b(\w+\.py)\b", rf"{EXAMPLES}/\1", words)
    paths = f"{PROGRAMS}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euc", line],
        check=False,
        cwd=here,
        env={**os.environ, **environment, "PATH": paths},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            "torchrun --nproc-per-node 2 fsdp2.py run/a 10",
            "torchrun --nproc-per-node 1 fsdp2.py run/a 12",
            ("steps 1 to 10 on 2 ranks", "steps 11 to 12 on 1 ranks"),
        ),
        (
            "python hugging_face.py run/b 10",
            "python hugging_face.py run/b 12",
            ("from step 0 to 10", "from step 10 to 12"),
        ),
        (
            "python lightning_trainer.py run/c 1",
            "python lightning_trainer.py run/c 2",
            ("after epoch 1, step 8", "after epoch 2, step 16"),
        ),
        (
            f"penstock training generate unet3d --data data {SMALL}; python own_loader.py data/train run/d 8",
            "python own_loader.py data/train run/d 16; penstock trace summary run/d-traces",
            ("samples 1 to 8", "samples 9 to 16"),
        ),
    ],
    ids=["fsdp2", "hugging_face", "lightning", "own_loader"],
)
def test_a_program_stops_and_continues(
    first: str, second: str, said: tuple[str, str], tmp_path: Path
) -> None:
    assert said[0] in run(first, tmp_path)
    printed = run(second, tmp_path)
    assert said[1] in printed
    if "trace" in second:
        assert re.search(r"train\.step +16 ", printed)


def test_levels_are_compared_and_traced(tmp_path: Path) -> None:
    small = "--megabytes 2 --checkpoints 2 --steps 1"
    printed = run(f"torchrun --nproc-per-node 2 levels_study.py fast slow {small}", tmp_path)
    names = [line.split()[0] for line in printed.splitlines() if line.endswith(" ms")]
    assert names == ["durable", "single", "single_flushed", "xor", "xor_flushed"]
    compared = run("penstock trace compare fast-traces/durable fast-traces/xor_flushed", tmp_path)
    assert "xor_flushed" in compared


def test_a_loader_of_ones_own_is_measured(tmp_path: Path) -> None:
    loader = "penstock training run --set metric.au=0 --loader measured_loader:make_loader --results runs"
    shutil.copy(EXAMPLES / "measured_loader.py", tmp_path)
    emulated = json.loads(run(f"{loader} --batch-time 5ms --json", tmp_path))
    waits = emulated["outside_of_score"]["waits"]
    assert (waits["batches"], waits["samples"], waits["workers"]) == (20, 80, 2)
    assert waits["stages"]["storage_s"] > waits["stages"]["compute_s"]
    assert "Waiting" in run(f"{loader} --step measured_loader:train --steps 5", tmp_path)


def test_checkpoints_live_in_an_object_store(tmp_path: Path, moto: S3Server) -> None:
    printed = run(f"python s3.py s3://{BUCKET}/example", tmp_path, **moto.environment)
    assert "steps [2, 3]\nrestored step 3" in printed
    listed = run(f"penstock checkpoint ls s3://{BUCKET}/example", tmp_path, **moto.environment)
    assert re.search(r"step-3 +3 +committed", listed)


def kubernetes(document: dict[str, Any]) -> None:
    """Check a document against the schema of its kind; an unknown key is an error."""
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_kubernetes_job_files_fit_their_schemas() -> None:
    documents = list(yaml.safe_load_all((EXAMPLES / "jobs/indexed-job.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in documents:
        kubernetes(document)
    mpi = yaml.safe_load((EXAMPLES / "jobs/mpijob.yaml").read_text())
    assert (mpi["apiVersion"], mpi["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert set(mpi["spec"]) <= {"slotsPerWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath"}
    assert set(mpi["spec"]["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for replica in mpi["spec"]["mpiReplicaSpecs"].values():
        assert set(replica) <= {"replicas", "template", "restartPolicy"}
        # The operator's pods are those of Kubernetes; only a Job's must say when they start again.
        template = {"spec": {"restartPolicy": "Never", **replica["template"]["spec"]}}
        kubernetes(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "x"},
                "spec": {"template": template},
            }
        )
    launcher = mpi["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"]
    workers = mpi["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert int(launcher[2]) == workers * mpi["spec"]["slotsPerWorker"]


@pytest.mark.parametrize("name", ["training.sbatch", "benchmark.sbatch"])
def test_slurm_job_files_are_shell_with_options_of_sbatch(name: str) -> None:
    text = (EXAMPLES / "jobs" / name).read_text()
    subprocess.run(["bash", "-n", "-c", text], check=True)
    options = re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE)
    assert len(options) == text.count("#SBATCH")
    known = "job-name nodes ntasks-per-node gpus-per-node cpus-per-task time signal output exclusive"
    assert set(options) <= set(known.split())


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("compose-spec", ["examples/container/compose.yaml"]),
        ("github-workflows", [".github/workflows/ci.yml"]),
        ("github-issue-forms", [".github/ISSUE_TEMPLATE/defect.yml", ".github/ISSUE_TEMPLATE/idea.yml"]),
        ("citation-file-format", ["CITATION.cff"]),
    ],
)
def test_files_that_other_programs_read_fit_their_schemas(schema: str, files: list[str]) -> None:
    check = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        f"vendor.{schema}",
        "--default-filetype",
    ]
    paths = [str(EXAMPLES.parent / name) for name in files]
    result = subprocess.run([*check, "yaml", *paths], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_commands_in_job_files_are_ones_that_there_are() -> None:
    texts = [path.read_text() for path in (EXAMPLES / "jobs").iterdir()]
    texts.append((EXAMPLES / "container/compose.yaml").read_text())
    verbs = {match for text in texts for match in re.findall(r"penstock ((?:[a-z]+ )?[a-z]+) ", text)}
    assert len(verbs) >= 5
    for verb in sorted(verbs):
        subprocess.run([PROGRAMS / "penstock", *verb.split(), "--help"], check=True, capture_output=True)


def test_the_image_installs_extras_that_there_are() -> None:
    text = (EXAMPLES / "container/Dockerfile").read_text()
    (extras,) = re.findall(r"/src\[([a-z,]+)\]", text)
    project = (EXAMPLES.parent / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))


def test_one_runs_notebook_has_outputs_and_runs_again(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(EXAMPLES / "one_run.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in code if not cell.source.startswith("import"))
    assert any("image/svg+xml" in output.get("data", {}) for cell in code for output in cell.outputs)
    os.environ["PATH"] = f"{PROGRAMS}:{os.environ['PATH']}"
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = json.dumps([dict(output) for cell in code for output in cell.outputs], default=str)
    assert "Bottleneck" in shown or "limit" in shown
