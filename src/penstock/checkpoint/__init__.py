"""The checkpoint engine, a library for training loops that knows nothing of benchmarks."""
