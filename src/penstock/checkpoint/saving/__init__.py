"""Saving: from the tensors of a state to durable, checksummed files. Start with `saver`."""
