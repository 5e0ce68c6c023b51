"""What lets a step survive lost nodes: groups, parity, the records of both, and what they can restore."""
