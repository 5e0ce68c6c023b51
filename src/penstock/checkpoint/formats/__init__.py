"""Checkpoints on disk: DCP, `torch.save`, safetensors, and our manifest."""
