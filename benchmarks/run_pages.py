"""What the page of a run costs: CPU seconds at the end of a run, and the bytes of each page.

    python benchmarks/run_pages.py RUN...

Each folder is drawn in a process of its own that has read the run's events already, as a run has at its end.
A limit: 1 CPU second, and 1.5 MB.
"""

import json
import subprocess
import sys

PROGRAM = """
import json, sys, time
from pathlib import Path
import penstock.bench.training.training_run, penstock.bench.checkpoint.checkpoint_run
from penstock.results import event_files
from penstock.results.run_record import read_record
folder = Path(sys.argv[1])
read_record(folder), event_files.read_events(folder)
before = time.process_time()
from penstock.reports.answer_page import render_answer_page
from penstock.results.run_page import draw_run
text = render_answer_page(draw_run(folder))
cold = time.process_time() - before
render_answer_page(draw_run(folder))
again = time.process_time() - before - cold
print(json.dumps({"first_cpu_s": cold, "again_cpu_s": again, "bytes": len(text)}))
"""


def main(folders: list[str]) -> None:
    """Print a line for each run."""
    for folder in folders:
        command = [sys.executable, "-c", PROGRAM, folder]
        cost = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"{cost['first_cpu_s']:.3f} s, again {cost['again_cpu_s']:.3f} s, {cost['bytes']:,} B  {folder}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
