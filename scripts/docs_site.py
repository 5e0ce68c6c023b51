"""`make docs`: build the site and follow every link in it, without a network.

Exits with 1 if mkdocs warns of anything, a link or an anchor leads nowhere, or a page loads something from
elsewhere.
"""

import os
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src"}


class _Page(HTMLParser):
    """The anchors, links and loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag defines and where it leads."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if given.get(LOADS.get(tag, "")) and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given[LOADS[tag]])


def main() -> int:
    """Build, check, and say what was found."""
    began_s = time.monotonic()
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        str(ROOT / "mkdocs.yml"),
    ]
    if (
        subprocess.run(
            build, check=False, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        ).returncode
        != 0
    ):
        return 1
    pages = {path: _Page(path) for path in sorted(SITE.rglob("*.html"))}
    wrong, num_links = [], 0
    for path, page in pages.items():
        for link in page.links + page.loads:
            num_links += 1
            if complaint := _follow(link, path, pages, is_loaded=link in page.loads):
                wrong.append(f"{path.relative_to(SITE)}: {link}: {complaint}")
    print("\n".join(wrong))
    print(
        f"{len(pages)} pages, {num_links:,} links, {len(wrong)} broken, "
        f"{time.monotonic() - began_s:.0f} s: {SITE / 'index.html'}"
    )
    return 1 if wrong else 0


def _follow(link: str, page: Path, pages: dict[Path, _Page], *, is_loaded: bool) -> str:
    """Why a link leads nowhere; "" where it leads somewhere. Other sites are not asked."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return "is loaded from elsewhere" if is_loaded and parts.scheme != "data" else ""
    folder = SITE if parts.path.startswith("/") else page.parent
    target = (folder / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return "no such file"
    anchor = unquote(parts.fragment)
    if target in pages and anchor not in pages[target].anchors and not anchor.startswith("__"):
        return "no such anchor"
    return ""


if __name__ == "__main__":
    sys.exit(main())
