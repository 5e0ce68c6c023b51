"""docs/storage.md names every option with its true default, and every copy that is counted."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.storage.files.file_storage import DirectOptions
from penstock.storage.objects.client import CLIENTS
from penstock.storage.objects.client_settings import ObjectOptions
from penstock.storage.objects.object_sink import GATHER_COPY
from penstock.storage.uri import parse_options

PAGE = (Path(__file__).parents[3] / "docs" / "storage.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\| ", PAGE, re.MULTILINE))


@pytest.mark.parametrize("kind", [DirectOptions, ObjectOptions])
def test_every_option_is_on_the_page_with_its_default(
    kind: type[DirectOptions | ObjectOptions],
) -> None:
    names = {option.name for option in fields(kind)}
    assert names <= ROWS.keys()
    told = {name: ROWS[name] for name in names if ROWS[name]}
    assert parse_options(kind, told, where="docs/storage.md") == kind()


def test_every_counted_copy_is_on_the_page() -> None:
    reads = {"obstore-read", "s3dlio-read", "s3torchconnector-read", "s3torchconnector-write"}
    assert all(f"`{name}`" in PAGE for name in {GATHER_COPY, "direct-unaligned", *reads})


def test_every_client_is_on_the_page() -> None:
    assert all(f"| `{name}` |" in PAGE for name in CLIENTS)
