"""The command line: one module for each group of commands. `main` is the console script."""

from penstock.cli.app import main

__all__ = ["main"]
