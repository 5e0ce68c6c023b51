"""Key-value caches of inference: what they need of storage, first simulated, then measured."""
