"""The launching side of the tests: `launch.py RANKS PROGRAM ARGS...`, as a command line would do it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from penstock.cluster.launcher_command import find_launcher, plan_launch
from penstock.cluster.supervision import launch_job
from penstock.environment import process_environment
from penstock.errors import PenstockError


def main() -> int:
    options, program, *arguments = sys.argv[1:]
    environment = process_environment()
    argv = (sys.executable, str(Path(__file__).with_name(program)), *arguments)
    try:
        launcher = find_launcher("auto", environment)
        plan = plan_launch(argv, environment, launcher=launcher, **json.loads(options))
        return launch_job(plan, start_timeout_s=60.0)
    except PenstockError as error:
        notes = getattr(error, "__notes__", []) if "PENSTOCK_SHOW_NOTES" in environment else []
        sys.stderr.write("\n".join([str(error), *notes]) + "\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
