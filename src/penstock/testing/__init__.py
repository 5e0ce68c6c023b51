"""Test kit for people who extend Penstock: contract suites, fault injection, crashes and power cuts.

Production code never imports it. `storage_contract` needs pytest; the other modules do not.
"""
