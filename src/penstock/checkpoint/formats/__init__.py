"""Formats of stored checkpoints: DCP, `torch.save`, safetensors, and Penstock's manifest."""
