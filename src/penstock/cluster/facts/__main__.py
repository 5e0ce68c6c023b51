"""The agent: prints this machine's facts, framed, and ends. One runs on each host."""

from __future__ import annotations

import sys
from socket import gethostname

from penstock.cluster.facts.frame import framed
from penstock.cluster.facts.reading import read_report
from penstock.environment import process_environment

if __name__ == "__main__":
    report = read_report(gethostname(), process_environment())
    sys.stdout.write(framed(report.model_dump_json()))
