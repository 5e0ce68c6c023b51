"""Reading trace files, whatever wrote them: bytes -> pages of lines -> batches of events, all accounted."""
