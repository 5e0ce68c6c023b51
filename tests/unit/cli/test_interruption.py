"""Signals that end a command, at the moments when an exception of theirs would get lost."""

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from penstock.cli.rank_options import _terminated_as_interrupted, _woken_by_signals

PATIENCE_S = 20.0


class Finalized:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def call_back() -> None:
    ctypes.CFUNCTYPE(None)(partial(signal.raise_signal, signal.SIGTERM))()


def finalize() -> None:
    Finalized()


def wait_after(arrive: Callable[[], object]) -> None:
    with _terminated_as_interrupted():
        arrive()
        time.sleep(PATIENCE_S)


@pytest.mark.parametrize("arrive", [call_back, finalize])
def test_a_signal_in_a_callback_whose_errors_are_ignored_ends_the_command(
    arrive: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"Stopped by SIGTERM\."):
        wait_after(arrive)
    assert "ignored" not in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_an_import_ends_the_command_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"drops_{number.name}.py").write_text(
        "import signal\n"
        "try:\n"
        f"    signal.raise_signal({int(number)})\n"
        "    came_back = True\n"
        "except KeyboardInterrupt:\n"
        "    came_back = False\n"
    )
    with pytest.raises(KeyboardInterrupt, match=f"Stopped by {number.name}."):
        wait_after(partial(importlib.import_module, f"drops_{number.name}"))
    assert sys.modules[f"drops_{number.name}"].came_back


IMPORTING = """
import signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
import penstock.cli
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_ctrl_c_while_the_command_line_is_loaded_is_explained() -> None:
    def load(module: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", IMPORTING, module]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)

    interrupted = load("penstock.cli.app")
    assert (interrupted.returncode, interrupted.stderr) == (130, "penstock: interrupted\n")
    assert load("none").stdout == "True\n"


def test_an_import_that_does_not_end_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("penstock.cli.rank_options._LONGEST_IMPORT_S", 0.05)
    (tmp_path / "never_ends.py").write_text(
        f"import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep({PATIENCE_S})\n"
    )
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait_after(partial(importlib.import_module, "never_ends"))
    assert time.monotonic() - before < PATIENCE_S


def test_a_signal_that_does_not_interrupt_the_wait_for_a_lock_ends_the_command() -> None:
    # A thread that waits for a lock is not woken by a signal that another thread gets.
    lock, is_over = threading.Lock(), threading.Event()
    receiver = threading.Thread(target=is_over.wait)
    receiver.start()
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    before = time.monotonic()
    try:
        with lock, _terminated_as_interrupted(), _woken_by_signals():
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(KeyboardInterrupt):
                lock.acquire(timeout=PATIENCE_S)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        is_over.set()
    assert time.monotonic() - before < PATIENCE_S / 2
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL
