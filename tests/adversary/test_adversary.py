"""A minute of each attack, at seeds of the day, and what the attacks once found."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
from tests.adversary import kills, liar, readers, states
from tests.adversary.attempts import account, seeds_within
from tests.adversary.reader_inputs import READERS
from tests.support.child_processes import run_children


@pytest.mark.slow
@pytest.mark.parametrize("attack", [states, kills, liar, readers], ids=lambda attack: attack.__name__[16:])
def test_a_minute_of_attacks_finds_nothing(attack: ModuleType) -> None:
    first = int(time.time()) // 60 % 1_000_000 * 1000
    assert account(attack.attack, seeds_within(first, 60.0)) == []


@pytest.mark.parametrize(("attack", "seeds"), [(states, (13, 24, 61, 147)), (kills, (6,)), (liar, (6,))])
def test_seeds_that_once_failed_fail_no_more(attack: ModuleType, seeds: tuple[int, ...]) -> None:
    assert account(attack.attack, iter(seeds)) == []


Change = Callable[[Path], object]
"""What is done to a valid input of a reader, or in an empty folder."""


def written(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def endless(name: str) -> Change:
    return lambda folder: (folder / name).symlink_to("/dev/zero")


def piped(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def spoiled(name: str, old: bytes, new: bytes) -> Change:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new))

    return change


def cut(name: str) -> Change:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


ROUNDS: Final = "checkpoint/checkpoints.json"
NORMAL: Final = b"train: {computation_time: {mean: 1e308, stdev: 1e-9, type: normal}}"
SIZE: Final = "training size {}/x.yaml --accelerators 4 --hosts 2 --host-memory 64GiB"
FOUND: Final[tuple[tuple[str, str, Change], ...]] = (
    ("", "workloads {}/x.yaml", written("x.yaml", b"train: {epochs: 2026-13-45T99:00:00Z}")),
    ("", "workloads {}/x.yaml", written("x.yaml", b"train: {epochs: %b}" % (b"9" * 5000))),
    ("", "workloads {}/x.yaml", written("x.yaml", b"1: 2")),
    ("", "workloads {}/x.yaml", endless("x.yaml")),
    ("", SIZE, written("x.yaml", NORMAL)),
    ("", "trace compare {}/x.yaml", written("x.yaml", b"runs: {a: 2026-13-45T99:00:00Z}")),
    ("", "trace compare {}/x.yaml", endless("x.yaml")),
    ("", "hosts {}/hosts", written("hosts", b"node1:" + b"9" * 5000)),
    ("", "hosts {}/hosts", endless("hosts")),
    ("", "cluster check {}/cluster.json", endless("cluster.json")),
    ("", "kvcache size {}/talk.json", written("talk.json", b'{"a":' * 2000)),
    ("", "kvcache size {}/x.jsonl", written("x.jsonl", b'{"hash_ids": [1], "timestamp": %b}' % (b"9" * 400))),
    ("", "kvcache size --model {}/config.json --users 3", written("config.json", b"[" * 2000)),
    ("model", "kvcache size --model {}/config.json --users 3", spoiled("config.json", b"128", b"NaN")),
    ("", "kvcache inspect {}", written("config.json", b'{"a":' * 2000)),
    ("results", "results page {}/training -o {out}/x.html", cut("training/steps.parquet")),
    ("results", "results page {}/training -o {out}/x.html", written("training/stages.json", b"\xff{")),
    (
        "results",
        "results page {}/checkpoint -o {out}/x.html",
        spoiled("checkpoint/checkpoints.json", b"began", b"x"),
    ),
    ("results", "results show {}/training", endless("training/status.json")),
    ("checkpoint", "restore {}/run", piped("run/step-2/__0_0.distcp")),
)


def read_found(root: Path) -> list[str]:
    """What is wrong with how inputs are read that once were read wrongly."""
    watch, wrong = readers.Watch(), []
    makers = {reader.name: reader.make for reader in READERS}
    for number, (reader, way, change) in enumerate(FOUND):
        folder, out = root / f"{number}/in", root / f"{number}/out"
        folder.mkdir(parents=True)
        out.mkdir()
        if reader:
            makers[reader](folder)
        change(folder)
        if failure := readers.try_input(way, folder, out, watch):
            wrong.append(f"{number} {reader} {way}: {failure}")
    return wrong


def test_inputs_that_once_were_read_wrongly_are_read_or_refused(tmp_path: Path) -> None:
    assert run_children([(read_found, (tmp_path,))], 120.0) == [[]]
