"""Time checkpoints: all writes, then all reads, through the engine's own pipeline.

The flow: layout -> rounds -> pipeline on every rank -> figures -> record. Invariant: a figure counts only
bytes that were acknowledged and made durable, or read and verified, and its time includes that durability or
verification.
"""
