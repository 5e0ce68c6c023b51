"""A thread for what goes on behind the trainer's back, and is finished before the program ends.

Python closes its pools of threads first when a program ends, so a save that is still on its way could start
no thread any more and would be lost. Invariant: what was submitted runs to its end, or to its own time limit.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def lasting_worker(name: str) -> ThreadPoolExecutor:
    """A pool of one thread. The end of the program waits for its work, while all other pools still work."""
    worker = ThreadPoolExecutor(1, thread_name_prefix=name)
    # What is registered later is called earlier: before the pools of threads, which registered on import.
    threading._register_atexit(worker.shutdown)  # type: ignore[attr-defined]  # noqa: SLF001 - nothing public comes in time
    return worker
