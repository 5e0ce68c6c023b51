"""Steps on several levels: caches on the nodes, protected by redundancy, and a durable level behind them."""
