"""What the machines of a cluster are: asked for on each host, kept in one file, compared with each other."""
