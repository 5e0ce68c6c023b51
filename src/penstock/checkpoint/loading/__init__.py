"""Loading a checkpoint into the memory of a state: open -> select -> plan -> read -> exchange -> land."""
