"""Levels of a checkpoint: node-local cache, redundancy over failure domains, background flush, rebuild."""
