"""A test kit for authors of storage back ends: the contract that a back end must keep, and faults to inject.

Production code never imports this package. `storage_contract` needs pytest.
"""
