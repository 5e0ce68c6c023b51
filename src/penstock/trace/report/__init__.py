"""A comparison on paper: one HTML page with plots, one Markdown page, one Parquet file of all tables."""

from penstock.trace.report.folder import write_report

__all__ = ["write_report"]
