"""The history of a results folder: every run that began there, how it ended, and where it is now.

`entries` are its lines, `file` reads and appends them, `kept` joins them with what is on disk, `selection`
decides what a removal takes, `trash` moves, `replay` plans a run once more.
"""
