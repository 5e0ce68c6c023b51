"""Draw `docs/demo.png`, the picture that the README opens with: the first screen of a demo's page.

    penstock demo --out /mnt/storage/demo
    python scripts/demo_picture.py /mnt/storage/demo/report.html

It takes Chromium, which must not reach the network: the page loads nothing.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image

PICTURE = Path(__file__).parents[1] / "docs" / "demo.png"
WIDTH, HEIGHT = 1180, 760


def draw(page: Path, picture: Path = PICTURE) -> None:
    """Take the first screen of `page` as `picture`."""
    if not page.is_file():
        sys.exit(f"No page here: {page}")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("No Chromium here: apt-get install chromium")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")
    subprocess.run(
        [
            program,
            *flags,
            f"--window-size={WIDTH},{HEIGHT}",
            f"--screenshot={picture}",
            page.resolve().as_uri(),
        ],
        check=True,
        stderr=subprocess.DEVNULL,  # a desktop's services are missed, in many lines
        timeout=120,
    )
    # A page has few colors: a palette of them takes a third of the bytes.
    Image.open(picture).quantize(96).save(picture, optimize=True)
    print(f"{picture}: {picture.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
