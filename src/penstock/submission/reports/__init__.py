"""Reports on checked results: documents, tables, pages, and the figures of each workload."""
