"""Key-value caches of inference: what they need of storage, simulated first and then measured."""
