"""Formats of others that hold tensors: archives of `torch.save`, and safetensors."""
