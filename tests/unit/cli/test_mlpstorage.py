"""mlpstorage's command lines, and the commands of penstock that they are translated to."""

import shlex
from pathlib import Path

import pytest

from penstock.cli.mlpstorage import FLAGS, NAMES, main, parse, translate
from penstock.errors import UsageError

DATA = "--data-dir /mnt/data"


def translated(line: str, *, tree: str = "/tree", bucket: str | None = None) -> tuple[str, list[str]]:
    environment = {} if bucket is None else {"BUCKET": bucket}
    words, remarks = translate(parse(shlex.split(line)), environment, lambda folder: folder == tree)
    return shlex.join(("penstock", *words)), remarks


def golden() -> list[tuple[str, str]]:
    """Pairs of the golden file: what was typed, and what it comes to."""
    text = (Path(__file__).parents[2] / "golden" / "mlpstorage" / "commands.txt").read_text()
    typed = [line.removeprefix("$ penstock-mlpstorage ") for line in text.splitlines() if line[:1] == "$"]
    done = [line.removeprefix("= ") for line in text.splitlines() if line[:1] == "="]
    return list(zip(typed, done, strict=True))


@pytest.mark.parametrize(("line", "expected"), golden())
def test_a_command_line_becomes_one_of_penstocks(line: str, expected: str) -> None:
    assert translated(line)[0] == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--hosts a b", "--ranks 8 --hosts a,b"),
        ("--hosts a:4,b:4", "--ranks 8 --hosts a:4,b:4"),
        ("--hosts localhost", "--ranks 8"),
        ("--mpi-bin mpirun --oversubscribe", "--ranks 8 --launcher mpirun --launcher-arg=--oversubscribe"),
        (
            "--mpi-params='-x A' --mpi-params=-v",
            "--ranks 8 --launcher-arg=-x --launcher-arg=A --launcher-arg=-v",
        ),
        ("--skip-fs-separation-gate", "--skip-gate apart --ranks 8"),
    ],
)
def test_ranks_are_started_as_asked(words: str, expected: str) -> None:
    command = translated(f"whatif training unet3d run file -na 8 {DATA} {words}")[0]
    assert command.endswith(f" {expected}")


def test_object_storage_is_a_prefix_in_the_bucket() -> None:
    command = translated("whatif training unet3d run object -na 1 -dd mlperf", bucket="big")
    assert "--data s3://big/mlperf/unet3d" in command[0]
    with pytest.raises(UsageError, match="Export BUCKET"):
        translated("whatif training unet3d run object -na 1 -dd mlperf")


def test_ignored_options_are_reported_once() -> None:
    command = translated(
        f"whatif training unet3d run file -na 8 {DATA} --verbose --debug --mpi-btl tcp -cm 512"
    )
    assert len(command[1]) == len(set(command[1])) == 4
    assert any(text.startswith("--mpi-btl is ignored") for text in command[1])
    assert any("measured by the ranks" in text for text in command[1])


def test_a_run_that_is_not_submitted_says_why() -> None:
    said = translated(f"closed training unet3d run file -na 8 {DATA} --results-dir /runs -sn fast")[1]
    assert any("/runs is not a submission tree" in text for text in said)


def test_the_size_of_a_data_set_is_submitted_later() -> None:
    command = translated("closed training unet3d datasize -at b200 -ma 8 -cm 128")
    assert "the size of the data set is added to the submission with the first run" in command[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("vectordb run --anything", "Run vector search with mlpstorage"),
        ("closed kvcache run --cache-dir /x", "penstock kvcache run mlperf-v3"),
        ("trainin run", "Did you mean training"),
        ("closed training unet3d run file --num-acelerators 8", "Did you mean --num-accelerators"),
        ("closed training unet3d fly", "'fly' is not a known word"),
        ("closed training unet3d run tape", "'tape' is not a known word"),
        ("training run --model unet3d --closed --open", "mutually exclusive"),
        (f"training run {DATA}", "No model is named"),
        ("training run --model unet3d", "Give --data-dir"),
        ("checkpointing run --model llama3-8b", "Give --checkpoint-folder"),
        ("training datasize --model unet3d", "Give --max-accelerators"),
        (f"training run --model unet3d -na eight {DATA}", "'eight' is not a whole number"),
        (f"training run --model unet3d --exec-type docker {DATA}", "Containers are not supported"),
        ("training run --model", "--model needs a value"),
        ("init", "No organization is named"),
        ("history forget", "'forget' is not a known command"),
        ("lockfile generate", "Lock files are not supported"),
    ],
)
def test_unsupported_requests_are_refused(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        translated(line)


def test_every_option_is_known_by_each_of_its_names() -> None:
    assert len(NAMES) > 60
    for spelling, name in NAMES.items():
        value = [] if name in FLAGS else ["7"]
        assert parse(["validate", spelling, *value]).has(name)


def test_a_dry_run_shows_the_command_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLPSTORAGE_DATA_DIR", str(tmp_path / "data"))
    config = tmp_path / "args.yaml"
    config.write_text("num_accelerators: 2\naccelerator_type: b200\no_direct: true\ndebug: false\n")
    code = main(["whatif", "training", "unet3d", "run", "file", "-na", "3", "-c", str(config), "--dry-run"])
    assert code == 0
    out = capsys.readouterr().out
    assert out == (
        f"penstock training run unet3d --accelerator b200 --data direct://{tmp_path}/data/unet3d"
        " --results . --ranks 3\n"
    )
    assert list(tmp_path.iterdir()) == [config]


def test_the_command_is_shown_and_its_exit_code_kept(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(shlex.split("closed training unet3d datasize -at b200 -ma 8 -cm 128 -nc 2 --verbose"))
    said = capsys.readouterr()
    assert code == 0
    assert "= penstock training size unet3d --accelerator b200" in said.err
    assert "--verbose is ignored: penstock prints what matters on stderr" in said.err
    assert "28,000 files" in said.out
    assert main(["validate", "/nowhere"]) == 2


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"]])
def test_help_and_version_need_no_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == (0 if words else 2)
    assert "penstock-mlpstorage" in capsys.readouterr().out
