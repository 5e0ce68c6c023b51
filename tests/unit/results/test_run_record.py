"""run.json is whole from the first moment on, says how a run ended, and never calls a dead one running."""

import json
import os
import string
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.run_events import even_run

from penstock.errors import StorageError, UsageError
from penstock.results import run_folder
from penstock.results.active_run import ActiveRun
from penstock.results.history import HistoryFile, find_run_folder
from penstock.results.phase_figures import PhaseFigures, compute_phase_figures
from penstock.results.provenance import (
    GitState,
    HostFacts,
    ProcessMark,
    git_state,
    identify_this_process,
    is_alive,
    package_versions,
    read_host,
    redact,
    unique_hosts,
)
from penstock.results.published_files import publishing, write_json
from penstock.results.run_folder import run_folders
from penstock.results.run_record import (
    LONGEST_SILENCE_S,
    RunOutcome,
    RunRecord,
    RunRequest,
    as_of_now,
    format_record,
    read_record,
    read_recorded_workload,
)
from penstock.results.run_status import Meter
from penstock.workload.load_workload import load
from penstock.workload.settings import parse_settings
from penstock.workload.spec import Workload, write_workload

GOLDEN = Path(__file__).parents[2] / "golden" / "results" / "run.json"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HOST = HostFacts(
    host="node1",
    kernel="Linux 6.1",
    machine="x86_64",
    num_cores=64,
    memory_bytes=512 * 2**30,
    cpuinfo={"model name": "A Processor"},
    meminfo={"MemTotal": "536870912 kB"},
)


def unet3d() -> Workload:
    return load("unet3d_h100").workload


def request(**changes: object) -> RunRequest:
    plain = RunRequest(workload=unet3d(), ranks=2, hosts=[HOST], command=["penstock", "training", "run"])
    return replace(plain, **changes)  # type: ignore[arg-type]  # fields of the test's own choice


def golden_record() -> RunRecord:
    return RunRecord(
        format=3,
        id="unet3d_h100-20260102-030405-1a2b3c",
        name="unet3d",
        accelerator="h100",
        outcome=RunOutcome.FINISHED,
        why="",
        started_at="2026-01-02T03:04:05.000000+00:00",
        ended_at="2026-01-02T03:14:05.000000+00:00",
        ranks=2,
        command=("penstock", "training", "run", "unet3d", "--accelerator", "h100"),
        settings={"AWS_ENDPOINT_URL": "http://node9:9000"},
        penstock_version="0.1.0",
        python_version="3.12.1",
        package_versions={"numpy": "2.4.6"},
        git=GitState(commit="0123456789abcdef0123456789abcdef01234567", is_modified=False),
        process=ProcessMark(boot_id="b", pid_namespace=1, pid=2, start_ticks=3),
        hosts=(HOST,),
        seeds={"order": 123},
        remarks=("DLIO ignores dataset.compression; here it compresses.",),
        workload={"dataset": {"format": "npz", "num_files_train": 168}},
        plan={"steps_per_epoch": 12, "read_bytes_per_epoch": 24628905504},
        train=golden_figures(),
    )


def golden_figures() -> PhaseFigures:
    dataset = replace(unet3d().dataset, num_files_train=16)
    reader = replace(unet3d().reader, batch_size=2)
    figures = compute_phase_figures(even_run(), replace(unet3d(), dataset=dataset, reader=reader))
    assert figures is not None
    assert figures.times is not None
    return replace(figures, times=replace(figures.times, by_rank={}))


def test_the_file_is_as_it_was_agreed() -> None:
    assert json.loads(format_record(golden_record())) == json.loads(GOLDEN.read_text())


def test_every_number_says_its_unit_in_its_key() -> None:
    train = json.loads(GOLDEN.read_text())["train"]
    dimensionless = {"num_steps", "epoch", "samples", "fastest_rank", "slowest_rank", "mean", "stdev"}
    dimensionless |= {"compute", "wait", "held_up", "barrier", "harness"}
    units = ("_percent", "_s", "_bytes", "_per_s", "_compat", "_strict")

    def check(node: object, key: str) -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                check(value, name)
        elif isinstance(node, list):
            for value in node:
                check(value, key)
        elif isinstance(node, int | float) and not isinstance(node, bool):
            assert key in dimensionless or key.endswith(units), key

    check(train, "")


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(format_record(golden_record()))
    assert read_record(tmp_path) == golden_record()


def test_a_run_is_recorded_before_it_starts_and_closed_with_its_figures(tmp_path: Path) -> None:
    figures = compute_phase_figures(even_run(), unet3d())
    with ActiveRun.start(tmp_path / "deep" / "results", request(seeds={"order": 7})) as run:
        seen = read_record(run.folder)
        assert (seen.outcome, seen.ended_at, seen.train) == (RunOutcome.RUNNING, None, None)
        assert seen.seeds == {"order": 7}
        assert seen.hosts == (HOST,)
        assert read_recorded_workload(seen, run.folder) == unet3d()
        run.finish(train=figures)
    seen = read_record(run.folder)
    assert seen.outcome is RunOutcome.FINISHED
    assert seen.ended_at is not None
    assert seen.train is not None
    assert figures is not None
    assert seen.train.epochs == figures.epochs
    assert seen.train.times is not None
    assert seen.train.times.by_rank == {}
    assert run.folder.name.startswith("unet3d_h100-20")
    assert [path.name for path in run.folder.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("ending", "outcome", "why"),
    [
        (
            KeyboardInterrupt(),
            RunOutcome.INTERRUPTED,
            "Stopped by its user, or because another rank failed.",
        ),
        (
            StorageError("The disk is gone", uri="/x"),
            RunOutcome.FAILED,
            "The disk is gone (/x)",
        ),
        (KeyError("disk"), RunOutcome.FAILED, "KeyError: 'disk'"),
    ],
)
def test_a_run_that_does_not_finish_says_why(
    tmp_path: Path, ending: BaseException, outcome: RunOutcome, why: str
) -> None:
    folders = []

    def broken() -> None:
        with ActiveRun.start(tmp_path, request()) as run:
            folders.append(run.folder)
            raise ending

    with pytest.raises(type(ending)):
        broken()
    seen = read_record(folders[0])
    assert (seen.outcome, seen.why) == (outcome, why)
    assert seen.ended_at is not None


def test_a_run_that_ends_without_figures_has_failed(tmp_path: Path) -> None:
    with ActiveRun.start(tmp_path, request()) as run:
        pass
    assert read_record(run.folder).why == "It ended without figures."


def test_a_figureless_finish_is_a_finish(tmp_path: Path) -> None:
    with ActiveRun.start(tmp_path, request()) as run:
        run.finish(train=compute_phase_figures(even_run(num_steps=1), unet3d()))
    seen = read_record(run.folder)
    assert seen.outcome is RunOutcome.FINISHED
    assert seen.train is not None
    assert seen.train.times is None


def running(mark: ProcessMark) -> RunRecord:
    return replace(golden_record(), outcome=RunOutcome.RUNNING, ended_at=None, process=mark)


def test_a_killed_run_counts_as_interrupted() -> None:
    own = identify_this_process()
    assert as_of_now(running(own), 10**6).outcome is RunOutcome.RUNNING
    reused = replace(own, start_ticks=own.start_ticks - 1)
    seen = as_of_now(running(reused), 0.0)
    assert (seen.outcome, seen.why) == (RunOutcome.INTERRUPTED, "Its process is gone.")


def test_run_on_another_host_counts_as_running_while_it_has_heartbeats() -> None:
    elsewhere = replace(identify_this_process(), boot_id="another")
    assert as_of_now(running(elsewhere), LONGEST_SILENCE_S - 1).outcome is RunOutcome.RUNNING
    assert as_of_now(running(elsewhere), LONGEST_SILENCE_S).outcome is RunOutcome.INTERRUPTED
    seen = as_of_now(running(elsewhere), 3600.0)
    assert (seen.outcome, seen.why) == (
        RunOutcome.INTERRUPTED,
        "No heartbeat from its host for 1 h 00 min.",
    )


def test_heartbeat_sets_the_time_of_the_file(tmp_path: Path) -> None:
    with ActiveRun.start(tmp_path, request()) as run:
        os.utime(run.folder / "run.json", (0, 0))
        run.heartbeat()
        assert (run.folder / "run.json").stat().st_mtime > 10**9
        run.finish()


def test_a_process_is_known_by_more_than_its_number() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        stat = Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()
        mark = replace(identify_this_process(), pid=sleeper.pid, start_ticks=int(stat[19]))
        assert is_alive(mark) is True
    finally:
        sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(mark) is False  # dead, though nobody has waited for it yet
    sleeper.wait(timeout=10)
    assert is_alive(mark) is False
    assert is_alive(replace(mark, pid_namespace=1)) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Cannot read this run"),
        (b"{", "Cannot read this run"),
        (b"[]", "format None"),
        (b'{"format": 99}', "format 99, not 3"),
        (b'{"format": 2, "id": "x"}', "not as Penstock writes it: name Field required"),
        (b"\xff\xfe", "Cannot read this run"),
    ],
)
def test_a_record_that_is_none_is_refused_with_its_path(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(StorageError, match=said) as refused:
        read_record(tmp_path)
    assert str(tmp_path / "run.json") in str(refused.value)


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    document = {**json.loads(format_record(golden_record())), "colour": "blue"}
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(StorageError, match="colour"):
        read_record(tmp_path)


def test_unknown_recorded_workload_is_an_error() -> None:
    record = replace(golden_record(), workload={**write_workload(unet3d(), only_set=True), "colour": "blue"})
    with pytest.raises(StorageError, match=r"colour.*run\.json"):
        read_recorded_workload(record, Path())


@pytest.mark.parametrize("name", ["unet3d", "resnet50_h100", "cosmoflow_a100", "dlrm_b200", "bert_v100"])
def test_every_workload_survives_its_record(name: str) -> None:
    workload = load(name, accelerator="" if "_" in name else "h100").workload
    values = json.loads(json.dumps(write_workload(workload, only_set=True)))
    record = replace(golden_record(), workload=values, name=workload.name, accelerator=workload.accelerator)
    assert read_recorded_workload(record, Path()) == workload


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["run", "--set", "reader.batch_size=4"], ["run", "--set", "reader.batch_size=4"]),
        (["-o", "secret_access_key=abc"], ["-o", "secret_access_key=***"]),
        (["++workload.storage.storage_options.access_key_id=abc"],
         ["++workload.storage.storage_options.access_key_id=***"]),
        (["--set", "storage.storage_options.secret_access_key=a=b"],
         ["--set", "storage.storage_options.secret_access_key=***"]),
        (["--password", "abc"], ["--password", "***"]),
        (["--data", "s3://user:pass@host/bucket"], ["--data", "s3://***@host/bucket"]),
        (["s3://b/x?session_token=abc&client=minio"], ["s3://b/x?session_token=***&client=minio"]),
        (["--endpoint=https://me:pw@host"], ["--endpoint=https://***@host"]),
        (["AWS_SECRET_ACCESS_KEY=abc"], ["AWS_SECRET_ACCESS_KEY=***"]),
        (["what?is=this"], ["what?is=this"]),
        (["--chunk-tokens", "256"], ["--chunk-tokens", "256"]),
        (["https://h/p?sig=abc&X-Amz-Signature=abc&a=b"], ["https://h/p?sig=***&X-Amz-Signature=***&a=b"]),
        (["a,https://me@h/x"], ["a,https://***@h/x"]),
        (["10.0.0.1@o2ib:/fs"], ["10.0.0.1@o2ib:/fs"]),
        (["nopass"], ["nopass"]),
        (["s3://b/keys/date=5"], ["s3://b/keys/date=5"]),
    ],
)  # fmt: skip
def test_no_secret_of_a_command_line_is_recorded(words: list[str], wanted: list[str]) -> None:
    assert redact(words) == tuple(wanted)


@given(st.text(string.ascii_letters + string.digits, min_size=8, max_size=20))
def test_a_secret_value_never_shows(secret: str) -> None:
    secret = f"zq{secret}"
    words = ["-o", f"secret_access_key={secret}", "--token", secret, f"s3://b?password={secret}"]
    assert secret not in " ".join(redact(words))


def test_the_users_settings_are_recorded_without_secrets(tmp_path: Path) -> None:
    environment = {
        "AWS_SECRET_ACCESS_KEY": "zq-hidden",
        "AWS_ENDPOINT_URL": "https://me:zq-hidden@host:9000",
        "PENSTOCK_CONTROL_TOKEN": "zq-hidden",
        "PATH": "/usr/bin",
    }
    with ActiveRun.start(tmp_path, request(environment=environment)) as run:
        run.finish()
    settings = {"AWS_ENDPOINT_URL": "https://***@host:9000", "AWS_SECRET_ACCESS_KEY": "***"}
    assert read_record(run.folder).settings == settings
    assert b"zq-hidden" not in (run.folder / "run.json").read_bytes()


def test_no_secret_of_a_uri_reaches_the_record_the_history_or_the_status(tmp_path: Path) -> None:
    uri = "pfs://me:zq-hidden@host/x?token=zq-hidden&client=minio"
    asked = replace(
        request(),
        plan={"access": {"to": uri, "storage": [uri]}},
        remarks=[f"reads go to {uri}"],
        workload=load("unet3d_h100", overrides=parse_settings([f"dataset.data_folder='{uri}'"])).workload,
    )

    def broken() -> None:
        with ActiveRun.start(tmp_path, asked) as run, Meter() as meter:
            run.show_in_folder(meter)
            raise StorageError("No answer", uri=uri)

    with pytest.raises(StorageError):
        broken()
    (folder,) = run_folders(tmp_path)
    shown = "pfs://***@host/x?token=***&client=minio"
    record = read_record(folder)
    assert record.plan == {"access": {"to": shown, "storage": [shown]}}
    assert record.remarks == (f"reads go to {shown}",)
    assert record.why == f"No answer ({shown})"
    assert HistoryFile(tmp_path).read()[0][-1]["why"] == record.why
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        assert b"zq-hidden" not in path.read_bytes(), path


def test_facts_of_this_host_are_read() -> None:
    facts = read_host("me")
    assert facts.memory_bytes > 2**20
    assert facts.num_cores >= 1
    assert facts.meminfo["MemTotal"].endswith(" kB")
    assert facts.cpuinfo
    assert facts.kernel.startswith("Linux")


def test_hosts_are_listed_once_in_the_order_of_ranks() -> None:
    other = replace(HOST, host="node0")
    assert unique_hosts([HOST, HOST, other, HOST]) == (HOST, other)


def test_versions_are_those_installed() -> None:
    versions = package_versions(["numpy", "no-such-package-anywhere"])
    assert list(versions) == ["numpy"]
    assert all(package_versions().values())


def test_the_working_folders_commit_is_known_where_there_is_one(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run([*git, "init", "-q"], check=True, timeout=30)
    assert git_state(tmp_path) is None
    (tmp_path / "a").write_text("1")
    subprocess.run([*git, "add", "a"], check=True, timeout=30)
    subprocess.run([*git, "commit", "-q", "-m", "First"], check=True, timeout=30)
    clean = git_state(tmp_path)
    assert clean is not None
    assert (len(clean.commit), clean.is_modified) == (40, False)
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == replace(clean, is_modified=True)
    # A repository that runs a program when git looks at it.
    subprocess.run([*git, "config", "core.fsmonitor", f"touch {tmp_path}/executed"], check=True, timeout=30)
    assert git_state(tmp_path) is None
    assert not (tmp_path / "executed").exists()


def test_folders_of_runs_have_speaking_names_of_their_own(tmp_path: Path) -> None:
    name = run_folder.run_folder_name("unet3d_h100", NOW, "1a2b3c")
    assert name == "unet3d_h100-20260102-030405-1a2b3c"
    assert run_folder.make_run_folder(tmp_path / "a" / "b" / name).is_dir()
    with pytest.raises(StorageError, match="Making the folder of this run"):
        run_folder.make_run_folder(tmp_path / "a" / "b" / name)
    odd = run_folder.run_folder_name("../my workload/ü", NOW, "1a2b3c")
    assert odd.startswith("my-workload-2026")
    assert run_folder.run_folder_name("...", NOW, "1a2b3c").startswith("run-2026")


def test_parent_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Making the folder of this run"):
        run_folder.make_run_folder(tmp_path / "file" / "x")


def test_a_run_is_named_by_folder_name_or_part(tmp_path: Path) -> None:
    for name in ("unet3d-1", "unet3d-2", "resnet50-1"):
        write_json(tmp_path / name, "run.json", {})
    (tmp_path / "notes").mkdir()
    assert find_run_folder(str(tmp_path / "unet3d-1"), Path("nowhere")) == tmp_path / "unet3d-1"
    assert find_run_folder("unet3d-2", tmp_path) == tmp_path / "unet3d-2"
    assert find_run_folder("resnet", tmp_path) == tmp_path / "resnet50-1"
    with pytest.raises(UsageError, match="names 2 runs: unet3d-1, unet3d-2"):
        find_run_folder("unet", tmp_path)
    with pytest.raises(UsageError, match="No run is called 'bert'"):
        find_run_folder("bert", tmp_path)
    with pytest.raises(StorageError, match="No such directory of runs"):
        find_run_folder("x", tmp_path / "absent")


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    def broken() -> None:
        with publishing(tmp_path / "table") as (draft, _):
            draft.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert list(tmp_path.iterdir()) == []
    with publishing(tmp_path / "table") as (draft, _):
        draft.write_bytes(b"whole")
    assert (tmp_path / "table").read_bytes() == b"whole"


def test_a_folder_that_another_user_puts_in_the_place_of_the_scratch_folder_is_not_used(
    tmp_path: Path,
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"kept")
    with publishing(tmp_path / "table") as (draft, _):
        (scratch,) = tmp_path.glob(".table.*")
        scratch.rename(tmp_path / "moved")
        scratch.mkdir()
        (scratch / "draft").symlink_to(victim)
        draft.write_bytes(b"whole")
    assert victim.read_bytes() == b"kept"
    assert (tmp_path / "table").read_bytes() == b"whole"
    assert not (tmp_path / "table").is_symlink()


def test_nan_and_infinity_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path, "x.json", {"rate": float("nan")})
    assert list(tmp_path.iterdir()) == []
