"""The benchmarks: storage probe, training runs, checkpoints."""
