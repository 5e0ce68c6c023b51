"""Words become calls: one module a noun, nothing else. `main` is the console script."""

from penstock.cli.app import main

__all__ = ["main"]
