"""A submission's runs: benchmarks whose outcome becomes leaves of a submission's tree."""
