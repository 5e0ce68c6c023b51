"""What is told of judged results: documents, tables, pages, and the figures of each workload with their spread."""
