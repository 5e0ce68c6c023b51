"""What a user asks for: workloads as data, loaded once at the edge, and the pure arithmetic on them."""
