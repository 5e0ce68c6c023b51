"""Key-value caches of LLM inference: what they need from storage, first simulated, then measured."""
