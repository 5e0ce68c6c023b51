"""The history of a results folder: every run that began there, how it ended, and where its folder is now.

`history_file` has the lines and those of one run, `run_catalog` joins them with the folders on disk,
`run_selection` chooses runs, `trash` removes and restores them, `rerun` repeats one.
"""
