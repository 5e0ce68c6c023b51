"""Figures of runs: the rows of each, from one SQL query that buckets them, and their drawing as SVG."""
