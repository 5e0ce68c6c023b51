"""The agent, one on each host: prints the facts of this machine between marks."""

import sys
from socket import gethostname

from penstock.cluster.facts.host_facts import frame_document
from penstock.cluster.facts.read_host import read_report
from penstock.environment import process_environment

if __name__ == "__main__":
    report = read_report(gethostname(), process_environment())
    sys.stdout.write(frame_document(report.model_dump_json()))
