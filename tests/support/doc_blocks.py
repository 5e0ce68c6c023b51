"""The blocks of the README and of the pages in docs, and how each is run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("**/*.md")))
_FENCED = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of shell or Python in a page."""

    page: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.number}"


def find_blocks() -> list[Block]:
    """All blocks, page by page, from top to bottom."""
    return [
        Block(page, number, *match.groups())
        for page in PAGES
        for number, match in enumerate(_FENCED.finditer((ROOT / page).read_text(encoding="utf-8")))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How one block is run, and what it must show.

    The block is the one of `page` that contains `key`. `replace` puts what a test has in place of what a
    reader has (a bucket, a mount point, a launcher); `before` is Python that makes names which the page takes
    as given. `shows` are patterns of what is printed; `figures` are patterns with one group, a number that
    must exceed the value each time. `elsewhere` names the test that runs the block, `named` is why it is not
    run at all.
    """

    page: str
    key: str
    replace: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    shows: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()
    elsewhere: str = ""
    named: str = ""

    def fits(self, block: Block) -> bool:
        """Whether this case is for the block."""
        return block.page == self.page and self.key in block.text

    def check(self, printed: str, here: Path) -> None:
        """Assert what the block must show, and the files that it must leave."""
        assert [name for name in self.leaves if not (here / name).exists()] == []
        for pattern in self.shows:
            assert re.search(pattern, printed, re.MULTILINE), f"{pattern!r} is not in:\n{printed}"
        for pattern, least in self.figures.items():
            found = [float(number.replace(",", "")) for number in re.findall(pattern, printed, re.MULTILINE)]
            assert found, f"{pattern!r} is not in:\n{printed}"
            assert min(found) > least, f"{pattern!r}: {found} in:\n{printed}"
