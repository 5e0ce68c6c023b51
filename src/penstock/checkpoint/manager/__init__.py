"""The checkpoints of one run: when they are saved, which are kept, which one is restored."""
