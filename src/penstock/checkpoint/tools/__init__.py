"""Tools for stored checkpoints: list, show, verify, compare, convert."""
