"""The compiled scanner of large JSON traces, behind two functions that are all other modules import.

Its code works on raw addresses, which is why it is fenced in: it understands whole lines of trace writers at
memory speed, and hands every other line back to `lenient_json.py`. Small inputs never come here, because the
machine code takes seconds to compile on a machine that has none in its cache, and half a second to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.optional_libraries import explained_imports

if TYPE_CHECKING:
    from penstock.trace.reading.event_filter import Prefilter
    from penstock.trace.reading.json_lines import LineScanner


def open_scanner(prefilter: Prefilter) -> LineScanner:
    """A scanner for one file. Compiles the loop if this machine has not done so yet."""
    with explained_imports("trace"):
        from penstock.trace.reading.native.scan_state import ScanState  # noqa: PLC0415 - numba is slow
    return ScanState(prefilter)


def needs_compiling() -> bool:
    """Whether the next `open_scanner` takes seconds, because machine code must be made for this machine."""
    with explained_imports("trace"):
        from penstock.trace.reading.native.native_scan import is_compiled  # noqa: PLC0415 - numba is slow
    return not is_compiled()
