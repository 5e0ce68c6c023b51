"""What is told of judged results: documents, tables, pages, and each workload's figures."""
