"""Checkpoints, timed: all writes, then all reads, on the engine's own pipe.

Place in the flow: layout -> rounds -> pipe on every rank -> figures -> record. Invariant: a figure comes from
bytes that were acknowledged and made durable, or read and verified, and from time that includes both.
"""
