"""The format of torch's distributed checkpoints (DCP) on disk: its archives and its `.metadata`."""
