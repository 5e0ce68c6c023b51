"""A test kit for authors of a storage back end: the contract that it must keep, and faults to inject.

Production code never imports this package. `storage_contract` needs pytest.
"""
