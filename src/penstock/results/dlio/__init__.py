"""DLIO's files: written from a run's own events, so that its readers read ours; and read from others' runs.

Keys, file names and units are DLIO's, odd ones included ("GB" and "MB" are GiB and MiB); values are right.
Invariant: nothing here is measured or judged anew; it is all shown from events and figures.
"""
