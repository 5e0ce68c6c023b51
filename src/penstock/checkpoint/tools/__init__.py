"""What people do with checkpoints that exist: look at them, verify, compare, convert and remove them."""
