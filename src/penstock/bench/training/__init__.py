"""The timed training run: workload -> plan -> batches -> loop -> results. `training_run.train` starts it.

Only the loop is timed; all that prepares it is reported separately.
"""
