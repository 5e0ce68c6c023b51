"""What is timed: the probe of a storage's limits, and every benchmark that is later compared with them."""
