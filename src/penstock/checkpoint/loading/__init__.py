"""Loading: from the files of a checkpoint back into the tensors of a state. Start with `loader`."""
