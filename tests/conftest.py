"""What the whole test suite shares."""

import atexit
import gc
import logging
import os
import signal
from typing import Any

import psutil
import pytest
from hypothesis import settings
from tests.support.browser import browser
from tests.support.s3.fixtures import faulty, lasting_fake, moto, radosgw
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

__all__ = ["browser", "faulty", "lasting_fake", "moto", "radosgw"]

pytest.register_assert_rewrite("penstock.testing.storage_contract")

WORKER_BYTES = 2 << 30
"""The memory that a worker takes at most, with the processes that its tests start."""

OBJECT_TESTS = "tests/integration/storage/objects/"

# Tests hold invariants, benchmarks hold speed: on a busy machine a deadline fails what is right.
# `make test` tries few examples of each property, each time other ones; `make test-slow` tries many.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile("quick")

# Threads of OpenMP spin as they wait for each other: where other tests have the cores, a copy of 8 MB by two
# takes a tenth of a CPU second, a hundred times as long as by one. Programs that tests start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Whoever starts the tests in the background may have them ignore Ctrl-C, and all programs that they start
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps the tests of a file, which share fixtures, on one worker; likewise all of object services.

    Ceph starts slowly, and s3dlio has one endpoint a process: the first one that a test names.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "objects" if file.startswith(OBJECT_TESTS) or "radosgw" in nodeid else file


class Scheduling:
    """The plugin that gives pytest-xdist this suite's order."""

    @staticmethod
    def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
        return FileScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two workers more than cores, where there is memory for them.

    For a third of their time tests wait: for disks that sync, for processes that start and end, for clocks.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores + 2, psutil.virtual_memory().available // WORKER_BYTES))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Offer the scheduling where pytest-xdist is at work, and collect tests without collecting garbage."""
    # Not in pytest_configure: xdist registers its session there, after the hooks of this file.
    plugins = session.config.pluginmanager
    if plugins.hasplugin("dsession"):
        plugins.register(Scheduling())  # this process collects no tests: its workers do
    else:
        gc.disable()


def pytest_collection_finish() -> None:
    """Let no test pay for what importing all of them has left in memory.

    Modules and collected tests stay to the end: frozen, they are not traversed at each full collection of
    garbage. torch has dozens of loggers that do not propagate, and pytest adds its handlers to each of these
    for every phase of every test; through the root logger pytest receives the same records.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # extension modules complain at the end about what is still alive
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many blocks of the pages were run: `make examples` prints it."""
    ran = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    blocks = [value for report in ran for name, value in report.user_properties if name == "block"]
    if blocks:
        named = blocks.count("named")
        asked = [
            report
            for kind in ("passed", "failed", "skipped", "error")
            for report in terminalreporter.stats.get(kind, [])
            if "test_every_block.py::test_a_block" in report.nodeid and report.when == "call"
        ]
        terminalreporter.write_line(
            f"blocks of README and docs: {len(blocks) - named} run and {named} named with a reason, "
            f"{len(blocks)} of {len(asked)}"
        )
