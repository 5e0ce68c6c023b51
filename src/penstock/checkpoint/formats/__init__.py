"""What checkpoints look like on disk: DCP, `torch.save`, safetensors, and our manifest."""
