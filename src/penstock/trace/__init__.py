"""I/O traces: captured, loaded, asked, compared, explained."""
