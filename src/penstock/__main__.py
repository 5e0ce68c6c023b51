"""`python -m penstock`: the command line for the interpreter at hand, as launchers start it on every rank."""

import sys

from penstock.cli import main

sys.exit(main())
