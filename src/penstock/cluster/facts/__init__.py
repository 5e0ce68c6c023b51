"""The machines of a cluster: their facts are read on each host, stored in one file, and compared."""
