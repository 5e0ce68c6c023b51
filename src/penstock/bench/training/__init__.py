"""The timed training run: workload -> plan -> batches -> loop -> results, with a ceiling run before it.

`run.train` is the way in. Invariant: only the loop is timed; all that prepares it is reported by itself.
"""
