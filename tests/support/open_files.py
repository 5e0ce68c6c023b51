"""Which files a test has left open, however many other threads of the process open and close their own."""

from contextlib import suppress
from pathlib import Path


def open_below(root: Path) -> list[str]:
    """The files and folders at or below `root` that this process holds open, deleted ones among them."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread closed it
            found.append(str(descriptor.readlink()))
    return [path for path in found if path == str(root) or path.startswith(f"{root}/")]
