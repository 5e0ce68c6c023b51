"""The levels study: the same checkpoints by several configurations, each traced, and their comparison."""
