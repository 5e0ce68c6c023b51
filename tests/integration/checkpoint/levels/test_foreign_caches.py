"""A cache that another user may have changed: nothing in it is loaded, followed, sent or removed."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.command_line import run_command
from tests.support.flush_daemons import daemons_below, ending_daemons, wait_until

from penstock.checkpoint.formats.description import read_manifest
from penstock.checkpoint.levels.flush import FlushFolder, FlushNote, FlushState, start_detached
from penstock.checkpoint.levels.options import Flush
from penstock.checkpoint.manager.manager import Manager
from penstock.errors import AccessRefused, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OTHER = 65534
with_two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture(autouse=True)
def _no_daemon_outlives_its_test(tmp_path: Path) -> Iterator[None]:
    with ending_daemons(tmp_path):
        yield


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """Two cached steps, one of them to be flushed, of a run that has another durable step."""
    with Manager(tmp_path / "durable", flush=None) as manager:
        manager.save(1, state_of(1))
    with manager_of(tmp_path) as manager:
        for step in (2, 3):
            manager.save(step, state_of(step))
    folder = FlushFolder(tmp_path / "cache")
    save_id = read_manifest((tmp_path / "cache/step-3/penstock.json").read_bytes(), "here").save_id
    folder.put(3, FlushNote(save_id=save_id, durable=f"{tmp_path}/durable", keep=1))
    return tmp_path


def manager_of(root: Path) -> Manager:
    return Manager(root / "durable", cache=root / "cache", flush=None, keep_cached=None)


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((1000,), float(step))}


def uses(root: Path) -> dict[str, tuple[int, str]]:
    """The exit code and the messages of every command that uses the cache."""
    cache, to = root / "cache", root / "durable"
    commands = {
        "flush": ("flush", cache),
        "flush elsewhere": ("flush", cache, "--to", to),
        "rm": ("rm", cache / "step-2", "--even-last"),
        "status": ("status", to, "--cache", cache),
    }
    ended = {name: run_command("checkpoint", *map(str, words)) for name, words in commands.items()}
    return {name: (each.returncode, each.stderr) for name, each in ended.items()}


def require_refused(root: Path, reason: str) -> None:
    names = sorted(path.name for path in (root / "cache").iterdir())
    with pytest.raises(AccessRefused, match=reason) as refusal:
        manager_of(root)
    assert "chmod -R go-w" in str(refusal.value)
    for name, (code, errors) in uses(root).items():
        assert (code, reason in errors) == (1, True), (name, errors)
    assert sorted(path.name for path in (root / "cache").iterdir()) == names
    assert [path.name for path in (root / "durable").glob("step-*")] == ["step-1"]


@with_two_users
@pytest.mark.parametrize(
    "what", [".", ".penstock-run", "step-2", ".penstock-flush", ".penstock-flush/step-3.json"]
)
def test_a_cache_in_which_anything_belongs_to_another_user_is_refused(what: str, cached: Path) -> None:
    os.chown(cached / "cache" / what, OTHER, OTHER)
    require_refused(cached, f"belongs to user {OTHER}")


@with_two_users
@pytest.mark.parametrize("what", ["cache", "cache/.penstock-flush"])
def test_a_link_of_another_user_is_not_followed(what: str, cached: Path) -> None:
    (cached / what).rename(cached / "aside")
    (cached / what).symlink_to(cached / "aside")
    os.chown(cached / what, OTHER, OTHER, follow_symlinks=False)
    require_refused(cached, f"belongs to user {OTHER}")


@pytest.mark.parametrize(
    ("what", "mode"),
    [(".", 0o777), (".", 0o775), (".", 0o1777), (".penstock-flush", 0o777)],
)
def test_a_cache_to_which_others_may_write_is_refused(what: str, mode: int, cached: Path) -> None:
    (cached / "cache" / what).chmod(mode)
    require_refused(cached, "others may write to")


@pytest.mark.parametrize("made", ["by the job", "before the job"])
def test_a_job_that_lets_its_group_write_makes_a_cache_that_only_it_may_change(
    made: str, tmp_path: Path
) -> None:
    if made == "before the job":
        (tmp_path / "cache").mkdir()
    umask = os.umask(0o002)
    try:
        with Manager(tmp_path / "durable", cache=tmp_path / "cache", flush=Flush(by="trainer")) as manager:
            manager.save(1, state_of(1))
    finally:
        os.umask(umask)
    assert (tmp_path / "cache").stat().st_mode & 0o022 == 0
    with manager_of(tmp_path) as manager:
        assert manager.restore(state := state_of(0)) == 1
    assert torch.equal(state["weight"], state_of(1)["weight"])


def test_a_link_of_its_user_leads_to_the_cache(cached: Path) -> None:
    (cached / "cache").rename(cached / "aside")
    (cached / "cache").symlink_to(cached / "aside")
    with manager_of(cached) as manager:
        assert manager.restore(state_of(0)) == 3


@with_two_users
def test_nothing_is_logged_through_a_link_of_another_user(cached: Path) -> None:
    kept = cached / "authorized_keys"
    kept.write_text("mine\n")
    log = cached / "cache/.penstock-flush/log"
    log.symlink_to(kept)
    os.chown(log, OTHER, OTHER, follow_symlinks=False)
    require_refused(cached, f"belongs to user {OTHER}")
    assert kept.read_text() == "mine\n"


def test_nothing_is_logged_through_any_link(cached: Path) -> None:
    kept = cached / "authorized_keys"
    kept.write_text("mine\n")
    folder = FlushFolder(cached / "cache")
    folder.log.symlink_to(kept)
    with pytest.raises(OSError, match="log"):
        start_detached(folder)
    assert kept.read_text() == "mine\n"


def test_names_do_not_begin_lines_of_the_log(cached: Path) -> None:
    folder = FlushFolder(cached / "cache")
    note = folder.notes()[3]
    shutil.rmtree(cached / "durable")
    (cached / "durable").write_text("in the way")
    folder.put(3, note.model_copy(update={"durable": f"{cached}/durable/\nssh-rsa KEY"}))
    start_detached(folder)
    wait_until(lambda: "ssh-rsa KEY" in folder.log.read_text(), "the failure is logged")
    folder.remove(3, note.save_id)
    wait_until(lambda: not daemons_below(cached), "the flusher ends")
    assert not [line for line in folder.log.read_text().splitlines() if line.startswith("ssh-rsa")]


@pytest.mark.parametrize("name", ["progress.json", "step-3.json"])
def test_a_pipe_in_place_of_a_note_or_of_the_progress_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = FlushFolder(tmp_path)
    folder.put(2, FlushNote(save_id="x", durable="/d"))
    os.mkfifo(folder.path / name)
    if name == "progress.json":
        assert folder.states() == {2: FlushState()}
    else:
        with pytest.raises(StorageError, match="not a file"):
            folder.notes()
