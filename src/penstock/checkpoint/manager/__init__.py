"""The checkpoints of one run: when they are saved, which are kept, and which one is restored."""
