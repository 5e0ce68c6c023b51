"""The doctor: everything missing has a fix, nothing is changed, and no check raises."""

from __future__ import annotations

import importlib.metadata
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cluster import doctor
from penstock.cluster.doctor import Diagnosis, examine
from penstock.optional_libraries import EXTRAS

if TYPE_CHECKING:
    import pytest


def _by_subject(folder: Path, environment: dict[str, str] | None = None) -> dict[str, Diagnosis]:
    return {seen.subject: seen for seen in examine(folder, environment or dict(os.environ))}


def test_every_lack_comes_with_a_fix_and_no_fix_without_a_lack(tmp_path: Path) -> None:
    for seen in examine(tmp_path, {}):
        assert bool(seen.fix) == (seen.state != "ok"), seen
        assert seen.found


def test_the_examination_covers_what_a_run_needs_and_leaves_no_trace(tmp_path: Path) -> None:
    subjects = _by_subject(tmp_path)
    needed = {"Python", "cores", "memory", "mpi4py", "torch", "mpiexec", "obstore", "s3dlio", "minio"}
    needed |= {"s3torchconnector", "credentials", str(tmp_path), "O_DIRECT", "/dev/shm", "open files"}
    needed |= {"locked memory", "monotonic", "synchronized", "strace"}
    assert needed <= subjects.keys()
    assert list(tmp_path.iterdir()) == []


def test_packages_of_all_extras_are_listed(tmp_path: Path) -> None:
    assert {extras[0] for extras in EXTRAS.values()} <= doctor._EXTRAS.keys()
    assert {"pillow", "numba", "duckdb", "jinja2", "zstandard", "dask"} <= _by_subject(tmp_path).keys()


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    subjects = _by_subject(tmp_path)
    assert subjects["minio"].state == "missing"
    assert "pip install 'penstock-io[minio]'" in subjects["minio"].fix


def test_secrets_are_named_but_never_shown(tmp_path: Path) -> None:
    environment = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "s3cr3t"}
    assert _by_subject(tmp_path, environment)["credentials"].state == "ok"
    said = "".join(seen.found + seen.fix for seen in examine(tmp_path, environment))
    assert "s3cr3t" not in said
    assert "AKIDEXAMPLE" not in said


def test_missing_credentials_are_named_one_by_one(tmp_path: Path) -> None:
    seen = _by_subject(tmp_path, {"AWS_ACCESS_KEY_ID": "x"})["credentials"]
    assert seen.found == "AWS_SECRET_ACCESS_KEY not set"


def test_a_low_limit_is_shown_with_the_command_that_raises_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, 4096))
    seen = _by_subject(tmp_path)["open files"]
    assert seen.state == "limited"
    assert "ulimit -n" in seen.fix


def test_a_file_system_that_refuses_direct_access_is_limited_not_fatal() -> None:
    seen = _by_subject(Path("/proc"))["O_DIRECT"]
    assert seen.state == "limited"
    assert "file://" in seen.fix
