import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from penstock.errors import Unavailable, UsageError
from penstock.storage import uri
from penstock.storage.files.file_storage import FileStorage
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.uri import open_storage


def test_file_schemes_open_buffered_or_direct_access() -> None:
    buffered = open_storage("file:///nowhere/yet", {})
    direct = open_storage("direct:///nowhere/yet", {})
    assert isinstance(buffered, FileStorage)
    assert isinstance(direct, FileStorage)
    assert (buffered.options["access"], direct.options["access"]) == ("buffered", "direct")
    assert (buffered.uri, direct.uri) == ("file:///nowhere/yet", "direct:///nowhere/yet")


def test_a_plain_path_is_buffered_files() -> None:
    assert open_storage("/nowhere/yet", {}).uri == "file:///nowhere/yet"


def test_options_override_those_of_the_uri() -> None:
    storage = open_storage("file:///x?fsync=no&writes_in_flight=2", {}, options={"fsync": "yes"})
    assert storage.options["fsync"] is True
    assert storage.options["writes_in_flight"] == 2


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("file:///x?writes_in_flight=0", "writes_in_flight is below 1"),
        ("direct:///x?writes_in_flight=0", "writes_in_flight is below 1"),
        ("direct:///x?alignment_bytes=1000", "not a power of two"),
        ("direct:///x?alignment_bytes=256", "not a power of two"),
        ("direct:///x?bounce_bytes=5000", "not a multiple of alignment_bytes"),
        ("direct:///x?bounce_bytes=0", "not a multiple of alignment_bytes"),
        ("file:///x?publish=never", "not a valid choice"),
        ("file:///x?alignment_bytes=4096", "Unknown option"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_any_file_is_touched(uri: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_storage(uri, {})


def test_an_unknown_scheme_names_the_nearest_and_all_known() -> None:
    with pytest.raises(UsageError) as caught:
        open_storage("direkt:///x", {})
    assert "Did you mean direct://?" in str(caught.value)
    assert "s3" in str(caught.value)


def test_a_scheme_like_no_other_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        open_storage("zzzzzz://x", {})
    assert "Did you mean" not in str(caught.value)


def test_another_packages_scheme_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = EntryPoint("theirs", "penstock.storage.in_memory:open_memory", uri.ENTRY_POINTS)
    other = EntryPoint("other", "nowhere:opener", uri.ENTRY_POINTS)
    monkeypatch.setattr(uri, "entry_points", EntryPoints([other, theirs]).select)
    assert isinstance(open_storage("theirs://place", {}), MemoryStorage)
    with pytest.raises(
        UsageError, match=r"theirs, or a plain path\. Packages can add schemes through entry points"
    ):
        open_storage("zzzzzz://x", {})


@pytest.mark.parametrize("value", ["nowhere:opener", "penstock.storage.in_memory:misspelt"])
def test_an_entry_point_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint("theirs", value, uri.ENTRY_POINTS)
    monkeypatch.setattr(uri, "entry_points", EntryPoints([entry]).select)
    with pytest.raises(Unavailable, match=rf"theirs:.* cannot be loaded: .*entry point theirs = '{value}'"):
        open_storage("theirs://place", {})


def test_opening_files_loads_no_object_client() -> None:
    program = (
        "import sys; from penstock.storage.uri import open_storage; open_storage('/tmp', {});"
        "sys.exit(any(name in sys.modules for name in ('obstore', 'minio', 's3dlio', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
