"""Several runs side by side: how they differ, the tables of a study, and findings.

runs.yaml -> study (events of all runs, accounts of their files) -> mismatches -> tables -> findings -> report
"""
