"""The README's tour, command by command, as a reader would type it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.s3.server import BUCKET

if TYPE_CHECKING:
    from tests.support.s3.server import S3Server

README = Path(__file__).parents[3] / "README.md"
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_tour_has_commands_and_a_program() -> None:
    assert {language for language, _ in BLOCKS} == {"sh", "python"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the whole tour: later steps look at what earlier ones left, as they do for a reader."""
    return tmp_path_factory.mktemp("tour")


@pytest.mark.parametrize(("language", "text"), BLOCKS, ids=[text.split("\n")[0][:40] for _, text in BLOCKS])
def test_a_step_of_the_tour_works(
    language: str, text: str, here: Path, moto: S3Server, typed: Callable[..., str]
) -> None:
    text = text.replace("s3://my-bucket/", f"s3://{BUCKET}/")
    typed(text, here, language=language, environment=moto.environment)
