"""What stands in several files of the project agrees: the version, its date, and links of its pages."""

import re
import tomllib
from pathlib import Path

import yaml

from penstock import __version__

ROOT = Path(__file__).parents[2]
EXAMPLES = ("examples/container/Dockerfile", "examples/container/compose.yaml", "examples/jobs/mpijob.yaml")


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == __version__ == str(citation["version"])
    for name in EXAMPLES:
        assert set(re.findall(r"penstock:(\d+\.\d+\.\d+)", (ROOT / name).read_text())) == {__version__}, name


def test_the_changelog_has_the_version_with_the_date_of_its_citation() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[:2] == ["Unreleased", f"{__version__} - {citation['date-released']}"]
