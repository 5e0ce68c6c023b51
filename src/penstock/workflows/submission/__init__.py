"""Run benchmarks whose outcome becomes result directories of a submission tree."""
