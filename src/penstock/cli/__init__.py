"""The command line: one module for each group of commands. `main` is the console script."""

import os
import signal
from contextlib import suppress


def _end(*_: object) -> None:
    os.write(2, b"penstock: interrupted\n")
    os._exit(130)


# While modules are loaded, there is nobody to explain a Ctrl-C, and nothing to clean up yet. Programs that
# import this package, from any thread, and shells that ignore the signal keep their own handling.
_is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
with suppress(ValueError):
    if _is_usual:
        signal.signal(signal.SIGINT, _end)

from penstock.cli.app import main  # noqa: E402

with suppress(ValueError):
    if _is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["main"]
