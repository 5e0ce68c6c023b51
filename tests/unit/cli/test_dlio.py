"""What the words of `penstock-dlio` mean, before anything is done: stages, folders, remarks, and places."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import __version__
from penstock.cli.dlio import (
    OUTPUT_VARIABLE,
    choose_loader,
    choose_run_folder,
    list_replaced,
    list_unused_stages,
    main,
    require_runnable_stages,
)
from penstock.cli.dlio_storage import data_location
from penstock.errors import UsageError
from penstock.workload.load_workload import load
from penstock.workload.settings import parse_dlio_words, parse_settings

if TYPE_CHECKING:
    from penstock.workload.spec import Workload

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def unet3d(*settings: str) -> Workload:
    return load("unet3d_h100", overrides=parse_settings(settings)).workload


def folder_of(words: str, *settings: str, environment: dict[str, str] | None = None) -> Path:
    _, asked = parse_dlio_words(words.split())
    run_dir = asked.get("hydra.run.dir")
    return choose_run_folder(run_dir, unet3d(*settings), environment or {}, now=NOW)


def s3(*settings: str) -> Workload:
    where = ("storage.storage_type=s3", "storage.storage_root=bucket", "dataset.data_folder=data/unet3d/")
    return unet3d(*where, *settings)


def option(text: str) -> str:
    return f"storage.storage_options.{text}"


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["workload=unet3d_h100", "--help"]])
def test_help_explains_dlios_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    for word in (
        "workload=",
        "++workload.",
        "hydra.run.dir=",
        "hydra.output_subdir=",
        "--config-dir",
        "Exit",
    ):
        assert word in shown


def test_without_words_the_default_workload_is_run_as_in_dlio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    shown = capsys.readouterr()
    assert "data/default" in shown.err  # where its data would be
    assert "generate" in shown.err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock-dlio {__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["workload=unet3d_h100", "hydra.verbose=true"], "'hydra.verbose=true' is not understood"),
        (["workload=unet3d_h100", "--config-dir"], "--config-dir names no folder"),
        (["workload=unet4d_h100"], "Did you mean unet3d_h100?"),
        (["-m", "workload=unet3d_h100,resnet50_h100"], "a command for each"),
        (["--config-name=other"], "--config-dir"),
        (
            ["workload=unet3d_h100", "++workload.dataset.num_fils_train=3"],
            "did you mean dataset.num_files_train?",
        ),
    ],
)
def test_contradictory_requests_exit_with_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""
    assert "Traceback" not in shown.err


def test_debug_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload=unet4d", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_stages_that_can_run_are_let_through() -> None:
    require_runnable_stages(unet3d())
    require_runnable_stages(unet3d("workflow.generate_data=true", "workflow.train=false"))
    require_runnable_stages(unet3d("workflow.checkpoint=true", "workflow.train=false"))
    require_runnable_stages(unet3d("workflow.checkpoint=true"))
    require_runnable_stages(unet3d("workflow.evaluation=true", "dataset.num_files_eval=2"))


def test_evaluation_without_training_is_said_to_have_nothing_to_do() -> None:
    generates = ("workflow.generate_data=true", "workflow.train=false", "workflow.evaluation=true")
    require_runnable_stages(unet3d(*generates))
    (remark,) = list_unused_stages(unet3d(*generates))
    assert remark.startswith("workflow.evaluation: ")
    assert list_unused_stages(unet3d("workflow.evaluation=true", "dataset.num_files_eval=2")) == ()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["workflow.train=false"], "workflow"),
        (["workflow.train=false", "workflow.evaluation=true"], "workflow"),
    ],
)
def test_stages_that_cannot_run_are_refused_by_their_key(settings: list[str], key: str) -> None:
    with pytest.raises(UsageError, match=r"\+\+workload\.workflow\.") as refused:
        require_runnable_stages(unet3d(*settings))
    assert refused.value.where == key


def test_default_run_folder_is_hydras() -> None:
    assert folder_of("workload=x") == Path.cwd() / "hydra_log" / "unet3d" / "2026-01-02-03-04-05"


def test_hydras_folder_is_taken_as_it_is_written() -> None:
    assert folder_of("hydra.run.dir=/out/run") == Path("/out/run")
    assert folder_of("hydra.run.dir=out/run") == Path.cwd() / "out" / "run"


def test_the_workloads_folder_comes_first_then_the_environments() -> None:
    told = {OUTPUT_VARIABLE: "/from/environment"}
    assert folder_of("hydra.run.dir=/out", environment=told) == Path("/from/environment")
    assert folder_of("hydra.run.dir=/out", "output.folder=/own", environment=told) == Path("/own")


def test_of_interpolations_those_of_dlios_own_default_are_resolved() -> None:
    found = folder_of("hydra.run.dir='/out/${workload.model.name}/${now:%Y-%m-%d}-${now:%H-%M-%S}'")
    assert found == Path("/out/unet3d/2026-01-02-03-04-05")
    with pytest.raises(UsageError, match="Of interpolations only"):
        folder_of("hydra.run.dir='out/${hydra.job.num}'")


def test_torchs_loader_is_used_where_the_workload_asks_for_it() -> None:
    pytest.importorskip("torch")
    options, said = choose_loader(unet3d("reader.read_threads=3"))
    assert (options.document()["name"], options.document()["workers"], said) == ("pytorch", 3, ())


def test_without_torch_the_replacing_loader_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "penstock.bench.loader.pytorch_loader", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    options, (said,) = choose_loader(unet3d())
    assert options.document()["name"] == "native"
    assert "pytorch is not used, because torch is not installed" in said


@pytest.mark.parametrize("name", ["tensorflow", "dali", "native_dali", "synthetic"])
def test_replaced_loaders_are_reported(name: str) -> None:
    options, (said,) = choose_loader(unet3d(f"reader.data_loader={name}", "reader.read_threads=5"))
    assert options.document()["threads"] == 5
    assert f"{name} is not used; penstock's own" in said


def test_replaced_reading_options_are_reported() -> None:
    said = list_replaced(
        unet3d(option("prefetch_window=8"), option("columns=[label]"), option("decode=arrow"))
    )
    assert len(said) == 2
    assert any("read_threads says how many" in text for text in said)
    assert any("dataset.parquet.columns" in text for text in said)


def test_local_data_lies_in_the_root_joined_with_its_folder() -> None:
    assert data_location(unet3d("storage.storage_root=/mnt"), {}).uri == "file:///mnt/data/unet3d"
    assert data_location(unet3d(), {}).uri == f"file://{Path.cwd()}/data/unet3d"


def test_an_absolute_data_folder_needs_no_root() -> None:
    settings = ("storage.storage_root=/mnt", "dataset.data_folder=/data/./unet3d/")
    assert data_location(unet3d(*settings), {}).uri == "file:///data/unet3d"


def test_a_missing_directory_of_workloads_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-dir=/nonexistent", "workload=unet3d_h100"]) == 2
    assert "No such directory (--config-dir /nonexistent)" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["storage.storage_type=direct_fs", "reader.odirect=true"])
def test_direct_files_are_read_past_the_page_cache(setting: str) -> None:
    location = data_location(unet3d("dataset.data_folder=/data", setting), {})
    assert location.uri == "direct:///data"
    assert location.options == {}


def test_objects_lie_in_the_root_as_bucket_under_the_folder_as_prefix() -> None:
    location = data_location(s3(), {"HOME": "/root"})
    assert location.uri == "s3://bucket/data/unet3d"
    assert location.options == {}
    assert location.environment == {"HOME": "/root"}
    assert data_location(s3("storage.storage_root=s3://bucket"), {}).uri == location.uri
    assert data_location(s3("dataset.data_folder=./data//unet3d"), {}).uri == location.uri


def test_every_option_of_an_object_service_reaches_its_client() -> None:
    given = (
        "endpoint_url=http://10.0.0.1:9000",
        "region=eu-1",
        "s3_force_path_style=false",
        "s3_max_attempts=7",
        "max_outstanding=32",
        "secure=false",
    )
    location = data_location(s3("storage.storage_library=minio", *map(option, given)), {})
    assert location.options == {
        "client": "minio",
        "endpoints": "http://10.0.0.1:9000",
        "region": "eu-1",
        "path_style": "false",
        "attempts": "7",
        "ranges_in_flight": "32",
    }


def test_keys_go_into_the_environment_of_the_client_and_are_never_shown() -> None:
    keys = (option("access_key_id=who"), option("secret_access_key=hidden"))
    location = data_location(s3(*keys), {"AWS_ACCESS_KEY_ID": "other", "AWS_REGION": "r"})
    assert location.environment == {
        "AWS_ACCESS_KEY_ID": "who",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "AWS_REGION": "r",
    }
    assert "hidden" not in repr(location)


@pytest.mark.parametrize(
    ("secure", "url"), [([], "https://h:9000"), (["true"], "https://h:9000"), (["false"], "http://h:9000")]
)
def test_an_endpoint_without_a_scheme_has_that_of_secure(secure: list[str], url: str) -> None:
    settings = [option("endpoint_url=h:9000"), *(option(f"secure={word}") for word in secure)]
    assert data_location(s3(*settings), {}).options["endpoints"] == url


def test_several_endpoints_of_one_service_are_used_in_turn() -> None:
    uris = "storage.endpoint_uris=[http://a:9000,http://b:9000]"
    workload = unet3d(
        "storage.storage_type=s3dlio",
        "storage.storage_root=s3://bucket",
        "storage.use_mpi_endpoint_distribution=true",
        uris,
    )
    location = data_location(workload, {})
    assert location.uri.startswith("s3://bucket/")
    assert location.options["endpoints"] == "http://a:9000,http://b:9000"
    assert location.options["client"] == "s3dlio"


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ([option("endpoint_url=http://h:9000"), option("secure=true")], "storage.storage_options.secure"),
        ([option("uri_scheme=file")], "storage.storage_options.uri_scheme"),
        ([option("s3_profile=mine")], "storage.storage_options.s3_profile"),
        (["storage.storage_type=aistore"], "storage.storage_type"),
        (["storage.storage_root=./"], "storage.storage_root, dataset.data_folder"),
        (["dataset.data_folder=s3://bucket/data"], "storage.storage_root, dataset.data_folder"),
    ],
)
def test_places_that_cannot_be_reached_are_refused_by_their_key(settings: list[str], where: str) -> None:
    with pytest.raises(UsageError) as refused:
        data_location(s3(*settings), {})
    assert refused.value.where == where
    assert refused.value.fix


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_other_clouds_are_reached_by_their_scheme(scheme: str) -> None:
    assert data_location(s3(option(f"uri_scheme={scheme}")), {}).uri == f"{scheme}://bucket/data/unet3d"
