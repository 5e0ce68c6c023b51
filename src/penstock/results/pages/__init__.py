"""Pages of runs: what a run's folder has recorded, as answers and charts."""
