"""Results of runs: records that programs read, pages that people read, and the way to follow a run."""
