"""Transfers between memory and storage: buffers, pipelines and their measurements."""
