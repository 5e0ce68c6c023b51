"""What the whole test suite shares."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import settings
from tests.support.browser import browser
from tests.support.s3.fixtures import faulty, lasting_fake, moto, radosgw

__all__ = ["browser", "faulty", "lasting_fake", "moto", "radosgw"]

pytest.register_assert_rewrite("penstock.testing.storage_contract")

OBJECT_TESTS = Path(__file__).parent / "integration" / "storage" / "objects"

# Tests hold invariants, benchmarks hold speed: on a busy machine a deadline fails what is right.
# `make test` tries few examples of each property, each time other ones; `make test-slow` tries many.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile("quick")

# Whoever starts the tests in the background may have them ignore Ctrl-C, and all programs that they start
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a file, which share fixtures, on one worker; likewise all of object services.

    Ceph starts slowly, and s3dlio has one endpoint a process: the first one that a test names.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        objects = "radosgw" in getattr(item, "fixturenames", ()) or OBJECT_TESTS in item.path.parents
        item.add_marker(pytest.mark.xdist_group("objects" if objects else str(item.path)))
