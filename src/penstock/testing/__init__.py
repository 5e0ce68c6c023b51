"""Test kit for people who write a storage back end: the contract it must keep, and faults to inject.

Production code never imports it. `storage_contract` needs pytest.
"""
