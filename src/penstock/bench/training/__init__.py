"""The timed training run: workload -> plan -> batches -> loop -> results. `training_run.train` starts it.

The score counts only the loop; its preparation is timed and reported separately.
"""
