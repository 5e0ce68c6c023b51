"""Several runs side by side: what they are not comparable in, the tables of a study, and what stands out.

runs.yaml -> study (events of all runs, accounts of their files) -> mismatches -> tables -> findings -> report
"""
