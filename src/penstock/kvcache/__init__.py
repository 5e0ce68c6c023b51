"""Key-value caches of inference: what they need from storage, first simulated, then measured."""
