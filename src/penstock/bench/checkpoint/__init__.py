"""Time checkpoints: all writes, then all reads, through the engine's own pipeline.

The flow: layout -> rounds -> pipeline on every rank -> figures -> record. Invariant: every figure is
computed from bytes that were acknowledged and made durable, or read and verified, and from a time that
includes both.
"""
