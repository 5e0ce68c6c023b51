"""`python -m penstock`: the command line for the interpreter at hand, as launchers start it on every rank."""

import sys

# Before anything else is imported: the working folder may be a stranger's.
if not sys.flags.safe_path:
    del sys.path[0]

from penstock.cli import main

sys.exit(main())
