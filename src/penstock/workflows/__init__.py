"""What needs several rooms at once: the demo's tour of the whole system."""
