"""`python -m penstock`: the command line in the current interpreter, as launchers start it on every rank."""

import sys

# This comes before any other import, because the working folder may be a stranger's.
if not sys.flags.safe_path:
    del sys.path[0]

from penstock.cli import main

sys.exit(main())
